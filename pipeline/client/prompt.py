"""The prompt of a request: the text that the model gets, and how long it may be before it is sent at all.

The count is that of the tokenizer that the deployment was packaged with, which is also what cuts the prompt on the
server. A text of so many characters that it cannot fit, whatever they are, is refused without being tokenized. Needs
the distribution `tokenizers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pipeline.client.errors import PromptTooLong, Refused
from pipeline.models.chat_template import ChatTemplate, Message, TemplateError
from pipeline.reading import MAX_TOKENIZER_BYTES, UnreadableFile, read_json, read_tokenizer

_DEPLOYMENT, _TOKENIZER = "deployment.json", "tokenizer.json"


class Tokenizer(Protocol):
    """What is needed of the `tokenizers` library."""

    def encode_batch_fast(self, texts: Sequence[str], /) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """
    >>> limit = PromptLimit.from_package(Path("package"))                          # doctest: +SKIP
    >>> client = Client("localhost:8001", prompt_limit=limit)                      # doctest: +SKIP
    """

    tokenizer: Tokenizer
    max_tokens: int  # that the engine takes
    max_chars_per_token: int | None = None  # that a token can stand for; None: any number

    @classmethod
    def from_package(cls, package: Path | str) -> Self:
        """Of the folder that `pipeline build` made, or of a copy of its deployment.json and tokenizer.

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
        """With the tokenizer.json of a folder. Refused if there is none, or it cannot be read."""
        file = Path(folder) / _TOKENIZER
        if not file.exists():
            raise Refused(f"{folder}: holds no {_TOKENIZER}")
        try:
            tokenizer, settings = read_tokenizer(file), read_json(file, most=MAX_TOKENIZER_BYTES)
        except UnreadableFile as error:
            raise Refused(str(error)) from error
        return cls(tokenizer, max_tokens, max_chars_per_token(settings))

    def check(self, text: str) -> int:
        """How many tokens a prompt has. Other threads go on meanwhile: the interpreter's lock is not held.

        Raises:
            PromptTooLong: more than the engine takes.
        """
        if self.max_chars_per_token is not None:
            least = -(-len(text) // self.max_chars_per_token)
            if least > self.max_tokens:
                raise PromptTooLong(least, self.max_tokens, at_least=True)
        # `encode` holds the lock, and also finds the place of each token in the text, which takes twice as long
        tokens = len(self.tokenizer.encode_batch_fast([text])[0])
        if tokens > self.max_tokens:
            raise PromptTooLong(tokens, self.max_tokens)
        return tokens


# What never makes a text shorter: parts of a tokenizer.json by their type. NFC and NFKC put up to four characters
# together (U+1F82 and its like); the others make one or more characters of each.
_LONGEST_COMPOSED = 4
_NORMALIZERS = {"ByteLevel": 1, "Lowercase": 1, "NFD": 1, "NFKD": 1, "Prepend": 1} | dict.fromkeys(
    ("NFC", "NFKC"), _LONGEST_COMPOSED
)
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")


def max_chars_per_token(settings: Mapping[str, Any]) -> int | None:
    """The most characters of a text that one token can stand for.

    That is the length of the longest token where a tokenizer drops nothing, has a token for everything, and turns no
    run of characters into one. None for all others: a WordPiece tokenizer makes one `[UNK]` of any word that it does
    not know, and many drop white space.

    Args:
        settings: the content of a tokenizer.json.
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
    """A normalizer or pre-tokenizer, or those of a sequence, which may hold sequences."""
    if part is None:
        return []
    return [one for inner in part[of] for one in _parts(inner, of)] if part["type"] == "Sequence" else [part]


def _replaced(part: Mapping[str, Any]) -> int | None:
    """1 for a normalizer that replaces a text by one that is as long, or longer."""
    pattern = part.get("pattern", {}).get("String") if part["type"] == "Replace" else None
    return 1 if pattern and len(part["content"]) >= len(pattern) else None


def _complete(model: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a model has a token for each byte, so that no text is unknown to it."""
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


def as_prompt(
    prompt: str | Sequence[Message], template: ChatTemplate | None, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Make the text that the model gets: a prompt as it is; messages, and tools that it may call, by the template.

    Raises:
        Refused: there is nothing to send, it cannot be encoded, or the template does not take the messages.
    """
    if isinstance(prompt, str):
        if tools:
            raise Refused("tools need messages: a plain prompt holds all that the model is told")
        if not prompt:
            raise Refused("the prompt is empty")
        return _encodable(prompt)
    if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        raise Refused('a prompt is a text, or a list of messages such as {"role": "user", "content": "Hi"}')
    if template is None:
        raise Refused(
            "messages need a chat template: Client(…, template=ChatTemplate.from_directory(tokenizer))"
        )
    try:
        return _encodable(template.render(prompt, tools=tools or None))
    except TemplateError as error:
        raise Refused(str(error)) from error


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise Refused(f"the prompt holds {half}, half of a character, which UTF-8 cannot encode") from None
    return text
