"""The headers of a checkpoint's safetensors files, without the files: how many weights there are, and of which types.

A file begins with 8 bytes, the length of its header, and then the header as JSON; so the first kilobytes of a file are
enough (https://github.com/huggingface/safetensors, version 0.x).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.errors import CheckpointError

FIRST_BYTES = 1 << 16  # most headers are shorter
_LONGEST_BYTES = 100_000_000  # the limit that the format sets
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I16": 16,
          "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightTotals:
    """All tensors of a checkpoint together."""

    weights: int
    bytes: int
    dtypes: Mapping[str, int] = field(default_factory=dict)  # type, as the format spells it -> weights


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]


def read_totals(names: Iterable[str], start_of: Callable[[str, int], bytes]) -> WeightTotals:
    """The totals over files; `start_of(name, size)` gives the first bytes of one.

    Raises:
        CheckpointError: a file is not a safetensors file, or its header is damaged.
    """
    dtypes: Counter[str] = Counter()
    for name in names:
        for entry in _entries(name, start_of):
            dtypes[entry.dtype] += math.prod(entry.shape)
    size = sum(count * _BITS[dtype] // 8 for dtype, count in dtypes.items())
    return WeightTotals(sum(dtypes.values()), size, dict(sorted(dtypes.items())))


def _entries(name: str, start_of: Callable[[str, int], bytes]) -> list[_Entry]:
    start = start_of(name, FIRST_BYTES)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= _LONGEST_BYTES:
        raise CheckpointError(f"{name} is not a safetensors file")
    if len(start) < 8 + length:
        start = start_of(name, 8 + length)
    try:
        tensors = json.loads(start[8 : 8 + length])
        found = [
            _Entry(str(one["dtype"]), tuple(one["shape"]))
            for key, one in tensors.items()
            if key != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} has a damaged header: {error}") from error
    unknown = sorted({entry.dtype for entry in found} - _BITS.keys())
    if unknown:
        raise CheckpointError(f"{name} has tensors of the unknown type {', '.join(unknown)}")
    return found
