"""The prompt of a request: rendered from messages, checked for its length, or built up turn by turn.

`PromptLimit` counts with the tokenizer that the deployment was packaged with, the same that tokenizes on the server. A
text of so many characters that it cannot fit, whatever they are, is refused without being tokenized. It needs the
distribution `tokenizers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, Self

from pipeline.client.errors import PromptTooLong, Refused
from pipeline.client.sampling import read_token_ids
from pipeline.models.chat_template import ChatTemplate, Message, TemplateError
from pipeline.reading import MAX_TOKENIZER_BYTES, UnreadableFile, read_json, read_tokenizer

Prompt = str | Sequence[Message] | Sequence[int]

_DEPLOYMENT, _TOKENIZER = "deployment.json", "tokenizer.json"


class BatchTokenizer(Protocol):
    """The method of `tokenizers.Tokenizer` that counts."""

    def encode_batch_fast(self, texts: Sequence[str], /) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """How many tokens a prompt may have, so that a prompt that is too long is refused before it is sent.

    Attributes:
        max_tokens: tokens that the engine takes.
        max_chars_per_token: the most characters that one token can stand for; None: any number.

    >>> limit = PromptLimit.from_package(Path("package"))                          # doctest: +SKIP
    >>> client = Client("localhost:8001", prompt_limit=limit)                      # doctest: +SKIP
    """

    tokenizer: BatchTokenizer
    max_tokens: int
    max_chars_per_token: int | None = None

    @classmethod
    def from_package(cls, package: Path | str) -> Self:
        """Read the limit of a deployment.

        Args:
            package: folder that `pipeline build` made, or a copy of its deployment.json and tokenizer.

        Raises:
            Refused: a file is missing, or is not what it should be.
        """
        file = Path(package) / _DEPLOYMENT
        try:
            deployment = read_json(file)
            folder, most = str(deployment["tokenizer_dir"]), int(deployment["limits"]["max_input_tokens"])
        except (UnreadableFile, ValueError, LookupError, TypeError) as error:
            raise Refused(f"{file}: does not tell the limits of a deployment: {error!r}") from error
        return cls.from_tokenizer(file.parent / folder, most)

    @classmethod
    def from_tokenizer(cls, folder: Path | str, max_tokens: int) -> Self:
        """Make a limit from the tokenizer.json of a folder.

        Raises:
            Refused: there is no tokenizer.json, or it cannot be read.
        """
        file = Path(folder) / _TOKENIZER
        if not file.exists():
            raise Refused(f"{folder}: holds no {_TOKENIZER}")
        try:
            tokenizer, settings = read_tokenizer(file), read_json(file, most=MAX_TOKENIZER_BYTES)
        except UnreadableFile as error:
            raise Refused(str(error)) from error
        return cls(tokenizer, max_tokens, max_chars_per_token(settings))

    def check(self, text: str | Sequence[int]) -> int:
        """Count the tokens of a prompt, without holding the interpreter's lock.

        Args:
            text: the whole prompt as the model gets it, with the chat template applied; or its token ids.

        Returns:
            Number of tokens.

        Raises:
            PromptTooLong: there are more than `max_tokens`.
        """
        if not isinstance(text, str):
            if len(text) > self.max_tokens:
                raise PromptTooLong(len(text), self.max_tokens)
            return len(text)
        if self.max_chars_per_token is not None:
            least = -(-len(text) // self.max_chars_per_token)
            if least > self.max_tokens:
                raise PromptTooLong(least, self.max_tokens, at_least=True)
        # `encode` would hold the lock and also compute offsets, which takes twice as long.
        tokens = len(self.tokenizer.encode_batch_fast([text])[0])
        if tokens > self.max_tokens:
            raise PromptTooLong(tokens, self.max_tokens)
        return tokens


# Normalizers by how many characters they can make one of. NFC and NFKC compose up to four (U+1F82 and its like); the
# others never make a text shorter.
_LONGEST_COMPOSED = 4
_NORMALIZERS = {"ByteLevel": 1, "Lowercase": 1, "NFD": 1, "NFKD": 1, "Prepend": 1} | dict.fromkeys(
    ("NFC", "NFKC"), _LONGEST_COMPOSED
)
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")


def max_chars_per_token(settings: Mapping[str, Any]) -> int | None:
    """Compute the most characters of a text that one token can stand for.

    Args:
        settings: the content of a tokenizer.json.

    Returns:
        The length of the longest token (times what normalizers compose), if the tokenizer drops nothing and has a token
        for every byte. None for any other: WordPiece makes one `[UNK]` of any unknown word, many drop white space.
    """
    model = settings["model"]
    normalizers = _parts(settings.get("normalizer"), "normalizers")
    pre_tokenizers = _parts(settings.get("pre_tokenizer"), "pretokenizers")
    added = settings.get("added_tokens") or []
    shrinks = [_NORMALIZERS.get(part["type"], _replaced(part)) for part in normalizers]
    drops = any(
        part["type"] not in _PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in pre_tokenizers
    ) or any(token["lstrip"] or token["rstrip"] for token in added)
    if None in shrinks or drops or not _complete(model, [*normalizers, *pre_tokenizers]):
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in added)]))
    return longest * math.prod(shrink for shrink in shrinks if shrink is not None)


def _parts(part: Mapping[str, Any] | None, of: str) -> list[Mapping[str, Any]]:
    """Flatten a normalizer or pre-tokenizer, which may be a sequence of others."""
    if part is None:
        return []
    return (
        [flat for inner in part[of] for flat in _parts(inner, of)] if part["type"] == "Sequence" else [part]
    )


def _replaced(part: Mapping[str, Any]) -> int | None:
    """Return 1 for a normalizer that replaces a text by one at least as long, else None."""
    pattern = part.get("pattern", {}).get("String") if part["type"] == "Replace" else None
    return 1 if pattern and len(part["content"]) >= len(pattern) else None


def _complete(model: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tokenizer's model has a token for each byte, so that no text is unknown to it."""
    if (
        model.get("type") != "BPE"
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        return False
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    from tokenizers.pre_tokenizers import ByteLevel

    by_bytes = any(part["type"] == "ByteLevel" for part in parts)
    return by_bytes and all(letter in model["vocab"] for letter in ByteLevel.alphabet())


def prompt_token_ids(prompt: Prompt) -> tuple[int, ...] | None:
    """Return the token ids of a prompt that is given as such; None for text and for chat messages.

    Raises:
        Refused: one of them cannot be a token id.

    >>> prompt_token_ids([1, 15043]), prompt_token_ids("Hi")
    ((1, 15043), None)
    """
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Integral):
        return None
    try:
        return read_token_ids(prompt)
    except ValueError as error:
        raise Refused(f"the prompt {error}") from None


def render_prompt(
    prompt: Prompt,
    template: ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text that the model gets, of a prompt that is not token ids.

    Args:
        prompt: a text, taken as it is, or chat messages.
        template: renders messages and tools.
        tools: functions that the model may call, as OpenAI's API describes them.
        variables: further values for the template, such as `add_generation_prompt`.

    Raises:
        Refused: the prompt is empty, cannot be encoded, or is not what the template takes; or there is no template.
    """
    if isinstance(prompt, str):
        if tools:
            raise Refused("tools need messages: a plain prompt holds all that the model is told")
        if not prompt:
            raise Refused("the prompt is empty")
        return _encodable(prompt)
    messages = [message for message in prompt if isinstance(message, Mapping) and "role" in message]
    if len(messages) != len(prompt):
        raise Refused(
            'a prompt is a text, token ids, or a list of messages such as {"role": "user", "content": "Hi"}'
        )
    if template is None:
        raise Refused(
            "messages need a chat template: Client(…, template=ChatTemplate.from_directory(tokenizer))"
        )
    try:
        return _encodable(template.render(messages, tools=tools or None, **(variables or {})))
    except TemplateError as error:
        raise Refused(str(error)) from error


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise Refused(f"the prompt holds {half}, half of a character, which UTF-8 cannot encode") from None
    return text


@dataclass(slots=True)
class Conversation:
    """Turns of a chat, as messages for the next request. It sends nothing and counts no tokens.

    Attributes:
        system: system prompt; empty is none.
        turns: (question, answer), oldest first.

    >>> talk = Conversation(system="Be brief.")
    >>> talk.add("Hi", "Hello!")
    >>> [message["role"] for message in talk.messages("How are you?")]
    ['system', 'user', 'assistant', 'user']
    """

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[Message]:
        """Return the messages of a request: system prompt, all turns, and `question`, which `add` keeps later."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for user_text, answered in self.turns:
            messages += [{"role": "user", "content": user_text}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Append a turn."""
        self.turns.append((question, answer))
