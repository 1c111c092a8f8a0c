"""Stop and bad words: as TensorRT-LLM's tensors, and stop words in text. Words of tokens are matched by the engine.

As tensors they are int32 [2, N], all ids in a row above, ends of the words below:

    ["no", "never"] -> [[ 5, 8, 9, 0],      5 | 8 9
                        [ 1, 3,-1,-1]]      ends after 1 and after 3 ids, then -1

Rows of a batch are padded with id 0 and end -1. A batch without words has N = 0.

In text, what comes before a stop word goes out; what follows does not, nor does the word itself, unless the request
wants it. A stop word may lie across pieces, so the end of a piece waits while it could be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Words = tuple[tuple[int, ...], ...]


def pack(batch: Sequence[Iterable[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Words of each row of a batch, as [batch, 2, N]. Words without ids are left out.

    >>> pack([[[5], [8, 9]]]).tolist()
    [[[5, 8, 9], [1, 3, -1]]]
    """
    rows = [[list(word) for word in words if len(word)] for words in batch]
    width = max((sum(map(len, words)) for words in rows), default=0)
    packed = np.zeros((len(rows), 2, width), np.int32)
    packed[:, 1] = -1
    for row, words in enumerate(rows):
        ids = [id for word in words for id in word]
        packed[row, 0, : len(ids)] = ids
        packed[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return packed


def unpack(packed: npt.NDArray[np.int32]) -> Words:
    """The words of one row [2, N].

    Raises:
        ValueError: The ends do not rise, or lie beyond the ids.

    >>> unpack(np.array([[5, 8, 9], [1, 3, -1]], np.int32))
    ((5,), (8, 9))
    """
    if packed.ndim != 2 or packed.shape[0] != 2:
        raise ValueError(f"has shape {list(packed.shape)}; must be [2, N]: ids above, ends of words below")
    ids, ends = packed[0].tolist(), [end for end in packed[1].tolist() if end >= 0]
    starts = [0, *ends]
    if any(end <= start for start, end in zip(starts, ends, strict=False)) or starts[-1] > len(ids):
        raise ValueError(f"has ends {ends} for {len(ids)} ids; ends must rise and lie within the ids")
    return tuple(tuple(ids[start:end]) for start, end in zip(starts, ends, strict=False))


class StopText:
    """Watches one growing text for stop words.

    >>> text = StopText(["STOP"])
    >>> [text.push("go ST"), text.push("ART ST"), text.push("OP now")]
    ['go ', 'START ', '']
    >>> text.stopped
    True
    """

    def __init__(self, words: Iterable[str], *, keeps: bool = False) -> None:
        """`keeps`: the stop word itself goes out, too."""
        self._keeps = keeps
        self._words = tuple(word for word in words if word)
        self._waiting = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Take more text; what of it may go out. Nothing, once a stop word was seen."""
        if self.stopped:
            return ""
        text = self._waiting + piece
        found = [(at, at + len(word)) for word in self._words if (at := text.find(word)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            begin, end = min(found)
            return text[: end if self._keeps else begin]
        keep = max((overlap(text, word) for word in self._words), default=0)
        self._waiting = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text has ended: what was waiting was no stop word."""
        rest, self._waiting = self._waiting, ""
        return rest


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that begins `word` without being all of it."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
