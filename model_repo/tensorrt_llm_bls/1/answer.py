"""The text of one answer while its tokens arrive. No Triton here."""

from __future__ import annotations

from collections.abc import Sequence

from shared.detokenizer import TextDecoder
from shared.stop_text import StopText


class Answer:
    """Turns the tokens of one row of a batch (and one beam) into text, up to the first stop word."""

    def __init__(self, decoder: TextDecoder, stop_words: Sequence[str], prompt: Sequence[int] = ()) -> None:
        """`prompt`: tokens that the engine repeats before the answer; their text goes out first, unwatched."""
        self._stream = decoder.stream()
        self._stop = StopText(stop_words)
        self._prompt_left = len(prompt)
        self.text = ""  # all that went out

    @property
    def stopped(self) -> bool:
        """Whether a stop word was seen: nothing more goes out."""
        return self._stop.stopped

    def push(self, tokens: Sequence[int]) -> str:
        """Take more tokens; the text that may go out now."""
        prompt, tokens = tokens[: self._prompt_left], tokens[self._prompt_left :]
        self._prompt_left -= len(prompt)
        return self._out(self._stream.push(prompt) + self._stop.push(self._stream.push(tokens)))

    def finish(self) -> str:
        """No more tokens will come; the rest of the text."""
        return self._out(self._stop.push(self._stream.finish()) + self._stop.finish())

    def _out(self, piece: str) -> str:
        self.text += piece
        return piece
