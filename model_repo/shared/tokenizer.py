"""Text to token ids and back, with the tokenizer.json that travels beside the model.

Only the `tokenizers` package is needed, not transformers. Written for Triton's Python backend; knows nothing of Triton.

While tokens arrive, each piece of text is text that no later token can change:

    joined pieces == decoding of all tokens at once

What must wait for more tokens: the bytes of a character that is not whole yet (an emoji is up to four tokens),
and a run of byte-fallback tokens (<0xE2>…), which the decoder reads as a whole. Leading spaces survive, because
text is taken from the decoding of a few tokens before the new ones, never from the new ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable
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


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character


class TextDecoder:
    """Decodes with one tokenizer: all tokens at once, or as they come.

    >>> TextDecoder(tokenizer).decode([39, 68, 75, 75, 78])
    'Hello'
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = frozenset(id for id, token in added.items() if skip_special_tokens and token.special)
        byte_ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_tokens = frozenset(id for id in byte_ids if id is not None)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of all these tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip_special_tokens)
        return text

    def is_visible(self, token: int) -> bool:
        """Whether the token takes part in the text: not special, and in the vocabulary."""
        return token not in self._skipped and self._tokenizer.id_to_token(token) is not None

    def stream(self) -> Detokenizer:
        """A new sequence, without tokens as yet."""
        return Detokenizer(self)


class Detokenizer:
    """The text of one growing sequence of tokens.

    >>> pieces = TextDecoder(tokenizer).stream()
    >>> [pieces.push([240]), pieces.push([159, 152]), pieces.push([128]), pieces.finish()]
    ['', '', '😀', '']
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # tokens whose text is not out yet, and a few before them
        self._sent = 0  # characters of the window's text that are out

    def push(self, tokens: Iterable[int]) -> str:
        """Take more tokens; the text that is certain now."""
        self._window += filter(self._decoder.is_visible, tokens)
        waiting = self._trailing_byte_tokens()
        text = self._decoder.decode(self._window[: len(self._window) - waiting])
        certain = text.rstrip(_UNFINISHED)
        piece = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if not waiting and self._sent == len(text):
            self._forget(text)
        return piece

    def finish(self) -> str:
        """No more tokens will come; the rest of the text, with U+FFFD for what is not whole."""
        piece = self._decoder.decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return piece

    def _trailing_byte_tokens(self) -> int:
        count = 0
        for token in reversed(self._window):
            if token not in self._decoder.byte_tokens:
                break
            count += 1
        return count

    def _forget(self, text: str) -> None:
        """All of the window's text is out: keep just as many tokens as the next ones need before them."""
        for start in range(len(self._window) - 1, 0, -1):
            tail = self._decoder.decode(self._window[start:])
            if tail and text.endswith(tail):
                self._window, self._sent = self._window[start:], len(tail)
                return
