"""Text to token ids, with the tokenizer.json that travels beside the model.

Only the `tokenizers` package is needed, not transformers. Written for Triton's Python backend; knows nothing of Triton.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


class TextTokenizer:
    """Encodes prompts and words.

    >>> TextTokenizer(folder).encode("Hello")        # with the tokens that the tokenizer puts in front
    [0, 39, 68, 75, 75, 78]
    """

    def __init__(self, folder: Path, *, add_special_tokens: bool = True) -> None:
        self.tokenizer = load_tokenizer(folder)
        self._add_special_tokens = add_special_tokens

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt.

        A prompt made from a chat template often starts with BOS already; then the tokenizer's own is left out.
        """
        encoding = self.tokenizer.encode(text, add_special_tokens=self._add_special_tokens)
        ids: list[int] = encoding.ids
        front = _leading_ones(encoding.special_tokens_mask)  # tokens that are not in the text
        if front and ids[front : 2 * front] == ids[:front]:
            return ids[front:]
        return ids

    def encode_word(self, word: str) -> list[int]:
        """The tokens of a stop word, a bad word or a word with a bias: of the text alone."""
        ids: list[int] = self.tokenizer.encode(word, add_special_tokens=False).ids
        return ids


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with a tokenizer.json; never cuts, never pads."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _leading_ones(mask: list[int]) -> int:
    return next((index for index, flag in enumerate(mask) if not flag), 0)
