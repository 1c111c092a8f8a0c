"""Stop words in text: what comes before one goes out, the word itself and what follows do not.

A stop word may lie across pieces, so the end of a piece waits while it could be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopText:
    """Watches one growing text for stop words.

    >>> text = StopText(["STOP"])
    >>> [text.push("go ST"), text.push("ART ST"), text.push("OP now")]
    ['go ', 'START ', '']
    >>> text.stopped
    True
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = tuple(word for word in words if word)
        self._waiting = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Take more text; what of it may go out. Nothing, once a stop word was seen."""
        if self.stopped:
            return ""
        text = self._waiting + piece
        found = [at for at in (text.find(word) for word in self._words) if at >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, word) for word in self._words), default=0)
        self._waiting = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text has ended: what was waiting was no stop word."""
        rest, self._waiting = self._waiting, ""
        return rest


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that begins `word` without being all of it."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
