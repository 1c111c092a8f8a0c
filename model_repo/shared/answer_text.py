"""The text of one answer as its tokens arrive, up to the first stop word."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from shared.stop_words import StopText
from shared.tokenizer import TextDecoder


class AnswerText:
    """Turns the tokens of one row of a batch (and one beam) into text, up to the first stop word.

    How much of the text goes out depends on the tokens alone, not on how they arrive. So an answer goes on exactly
    where it broke off if its tokens so far are given as `prior`.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stop_words: Sequence[str],
        prompt: Sequence[int] = (),
        *,
        stop_tokens: frozenset[int] = frozenset(),
        keeps_stop: bool = False,
        prior: Sequence[int] = (),
    ) -> None:
        """
        Args:
            decoder: Decoder of the model's tokens.
            stop_words: Texts that end the answer.
            prompt: Tokens that the engine repeats before the answer; their text goes out first, unwatched.
            stop_tokens: Tokens that end the answer, and whose text does not go out.
            keeps_stop: Whether the stop word is part of the answer.
            prior: Tokens of the answer that came before, from another server; their text has gone out.
        """
        self._stream = decoder.stream()
        self._stop = StopText(stop_words, keeps=keeps_stop)
        self._stop_tokens = frozenset() if keeps_stop else stop_tokens
        self._prompt_left = len(prompt)
        self.text = ""  # all that went out
        self.push(prior)

    @property
    def stopped(self) -> bool:
        """Whether a stop word was seen: nothing more goes out."""
        return self._stop.stopped

    def push(self, tokens: Sequence[int]) -> str:
        """Take more tokens; the text that may go out now."""
        prompt, tokens = tokens[: self._prompt_left], tokens[self._prompt_left :]
        self._prompt_left -= len(prompt)
        if self._stop_tokens:
            tokens = list(takewhile(lambda token: token not in self._stop_tokens, tokens))
        return self._out(self._stream.push(prompt) + self._stop.push(self._stream.push(tokens)))

    def finish(self) -> str:
        """No more tokens will come; the rest of the text."""
        return self._out(self._stop.push(self._stream.finish()) + self._stop.finish())

    def _out(self, piece: str) -> str:
        self.text += piece
        return piece
