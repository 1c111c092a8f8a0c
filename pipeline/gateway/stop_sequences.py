"""Which stop sequence ended an answer: engines do not tell, but they can leave it at the end of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.client import Chunk


class StopSequenceCutter:
    """Cuts the stop sequence off an answer that was generated with `include_stop_str_in_output`, chunk by chunk.

    Attributes:
        found: the sequence that ended the answer; None if none did.
    """

    def __init__(self, sequences: Sequence[str], *, keeps: bool = False) -> None:
        """
        Args:
            sequences: stop sequences of the request.
            keeps: whether the sequence stays in the text.
        """
        self.found: str | None = None
        self._sequences, self._keeps = [one for one in sequences if one], keeps
        self._waiting = ""  # what may be a stop sequence

    def cut(self, chunk: Chunk) -> Chunk:
        """Return the next chunk with the text that is certain to be no stop sequence."""
        if not self._sequences:
            return chunk
        text, self._waiting = self._waiting + chunk.text, ""
        if chunk.finish_reason is None:
            kept = len(text) - max(_overlap(text, sequence) for sequence in self._sequences)
            text, self._waiting = text[:kept], text[kept:]
        elif chunk.finish_reason != "length":
            # Of several, the one that begins first ended the answer.
            self.found = max(filter(text.endswith, self._sequences), key=len, default=None)
            if self.found is not None and not self._keeps:
                text = text.removesuffix(self.found)
        return replace(chunk, text=text)


def _overlap(text: str, sequence: str) -> int:
    """Length of the longest end of a text with which a stop sequence begins, or that is one.

    >>> _overlap("so ST", "STOP"), _overlap("so STOP", "STOP")
    (2, 4)
    """
    sizes = range(min(len(sequence), len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(sequence[:size])), 0)
