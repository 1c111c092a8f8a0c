"""Stop and bad words as TensorRT-LLM takes them: int32 [2, N], all ids in a row above, ends of the words below.

    ["no", "never"] -> [[ 5, 8, 9, 0],      5 | 8 9
                        [ 1, 3,-1,-1]]      ends after 1 and after 3 ids, then -1

Rows of a batch are padded with id 0 and end -1. A batch without words has N = 0.
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
        ValueError: the ends do not rise, or lie beyond the ids.

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
