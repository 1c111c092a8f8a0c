"""The largest of many values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TAKEN = 6  # the cut is that value of the sample: about three times as many as are wanted reach it
_MANY = 16  # times as many values as are wanted: from there on a cut saves time


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Where the `count` (at least 1) largest are, in no order.

    A sample of many values gives a cut, and only what reaches it is partitioned; all of them where too few do.

    >>> sorted(largest(np.array([3, 1, 4, 1, 5], np.float32), 2).tolist())
    [2, 4]
    """
    if count >= len(values):
        return np.arange(len(values))
    if len(values) >= _MANY * count:
        sample = values[:: max(1, count // 2)]
        cut = np.partition(sample, len(sample) - _TAKEN)[len(sample) - _TAKEN]
        few = np.flatnonzero(values >= cut)
        if len(few) >= count:
            return few[_partitioned(values[few], count)]
    return _partitioned(values, count)


def _partitioned(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    rest = len(values) - count
    return np.argpartition(values, rest)[rest:] if rest else np.arange(count)
