"""The headers of a checkpoint's safetensors files, without the files: how many weights there are, and of which types.

A file begins with 8 bytes, the length of its header, and then the header as JSON; so the first kilobytes of a file are
enough (https://github.com/huggingface/safetensors, version 0.x).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.reading import UnreadableFile, parse_json

FIRST_BYTES = 1 << 16  # most headers are shorter
LONGEST_BYTES = 100_000_000  # the limit that the format sets
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I16": 16,
          "I8": 8, "U8": 8, "BOOL": 8, "F4": 4, "F8_E8M0": 8}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightTotals:
    """All tensors of a checkpoint together."""

    weights: int
    bytes: int
    dtypes: Mapping[str, int] = field(default_factory=dict)  # type, as the format spells it -> weights


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor, as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file; of `parse_header`, from the end of the header
    end: int
    file: Path = Path()  # where a file of a folder was read


def parse_header(content: bytes, file: str) -> list[HeaderEntry]:
    """List the tensors of a header's JSON, in the order of the file.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        tensors = parse_json(content, f"{file}, header")
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from error
    entries = []
    for name, entry in tensors.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
                isinstance(size, int) and size >= 0 for size in shape
            ):
                entries.append(HeaderEntry(name, dtype, tuple(shape), begin, end))
            case _:
                raise CheckpointError(
                    f"{file} has a damaged header: {name[:80]!r} is not described by dtype, shape and data_offsets"
                )
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def read_totals(names: Iterable[str], start_of: Callable[[str, int], bytes]) -> WeightTotals:
    """Count the weights of several files by their headers; `start_of(name, size)` gives the first bytes of a file.

    Raises:
        CheckpointError: a file is not a safetensors file, or its header is damaged.
    """
    dtypes: Counter[str] = Counter()
    for name in names:
        for entry in read_entries(name, start_of):
            dtypes[entry.dtype] += math.prod(entry.shape)
    size = sum(count * BITS[dtype] // 8 for dtype, count in dtypes.items())
    return WeightTotals(sum(dtypes.values()), size, dict(sorted(dtypes.items())))


def read_entries(name: str, start_of: Callable[[str, int], bytes]) -> list[HeaderEntry]:
    """List the tensors of a file by its header; `start_of(name, size)` gives the first bytes of it.

    Raises:
        CheckpointError: it is not a safetensors file, or its header is damaged.
    """
    start = start_of(name, FIRST_BYTES)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= LONGEST_BYTES:
        raise CheckpointError(f"{name} is not a safetensors file")
    if len(start) < 8 + length:
        start = start_of(name, 8 + length)
    entries = parse_header(start[8 : 8 + length], name)
    unknown = sorted({entry.dtype for entry in entries} - BITS.keys())
    if unknown:
        raise CheckpointError(f"{name} has tensors of the unknown type {', '.join(unknown)}")
    start_of_data = 8 + length
    return [
        replace(tensor, begin=tensor.begin + start_of_data, end=tensor.end + start_of_data)
        for tensor in entries
    ]
