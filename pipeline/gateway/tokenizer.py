"""A model's tokenizer as the gateway uses it: for prompts, texts of tokens and their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.gateway.errors import ApiError
from pipeline.gateway.text_processes import ProcessTokenizer, TextProcesses

# Enough for every token of most vocabularies.
_MAX_REMEMBERED = 200_000


class ModelTokenizer:
    """Encodes, decodes, and tells the text of single tokens. Safe to use from several threads.

    Long texts are encoded in processes, which blocks.

    >>> ModelTokenizer(Tokenizer.from_file("tokenizer.json")).decode([1, 15043])       # doctest: +SKIP
    '<s> Hello'
    """

    def __init__(self, tokenizer: Any, processes: TextProcesses | None = None) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`; `processes` encode what is long (None: nothing is)."""
        self._tokenizer = self._encoder = tokenizer
        if processes is not None:
            self._encoder = ProcessTokenizer(tokenizer, processes)
        self._texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, with or without the tokens that the tokenizer puts around it."""
        return list(self._encoder.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids that the engine gets for a prompt.

        They begin with the tokenizer's special tokens. A chat template often writes those itself; then its own count.
        """
        encoding = self._encoder.encode(text, add_special_tokens=True)
        ids: list[int] = encoding.ids
        front = next((at for at, special in enumerate(encoding.special_tokens_mask) if not special), 0)
        return ids[front:] if front and ids[front : 2 * front] == ids[:front] else ids

    def count(self, text: str) -> int:
        """Count the tokens of a text that a model wrote, as accurately as the text alone allows."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with that of special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a text begins and ends in it, without tokens that are put around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the special tokens."""
        added: dict[int, Any] = getattr(self._tokenizer, "get_added_tokens_decoder", dict)()
        return frozenset(token.content for token in added.values() if token.special)

    def has_token(self, token: str) -> bool:
        """Whether the vocabulary has a token of this name, such as <|fim_prefix|>."""
        return self._tokenizer.token_to_id(token) is not None

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Check that token ids, in field `param` of a request, are in the vocabulary.

        Raises:
            ApiError: 400, with the first that is not.
        """
        for id in ids:
            if id < 0 or self._tokenizer.id_to_token(id) is None:
                raise ApiError(400, f"{param}: token id {id} is out of vocabulary", param=param)

    def token_name(self, id: int) -> str:
        """Return the name of a token in the vocabulary, such as "▁Hello"; "" if it has none."""
        return self._tokenizer.id_to_token(id) or ""

    def token_text(self, id: int) -> str:
        """Return the text of a token within a text: some tokenizers drop the space before the first token."""
        text = self._texts.get(id)
        if text is None:
            before = self.encode("a", add_special_tokens=False)
            text = self.decode([*before, id])[len(self.decode(before)) :]
            if len(self._texts) < _MAX_REMEMBERED:
                self._texts[id] = text
        return text
