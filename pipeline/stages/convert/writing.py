"""Tensors to a safetensors file one after the other, a few rows at a time: memory stays small, whatever their size.

Format: https://github.com/huggingface/safetensors, version 0.x.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.checkpoint.tensors import DTYPES, Array, TensorFiles
from pipeline.stages.convert.layout import Part, Slice

_CHUNK_BYTES = 32 * 2**20
_ALIGNMENT = 8  # of the first tensor, as the reference implementation pads its header


def write_rank(
    file: Path, parts: Sequence[Part], source: TensorFiles, dtype: str, advance: Callable[[int], None]
) -> None:
    """Write one rank.

    Args:
        dtype: of tensors that name none: "BF16" or "F16".
        advance: told the bytes as they are written.
    """
    with file.open("wb") as stream:
        stream.write(_header(parts, dtype))
        for part in parts:
            for chunk in _chunks(part, source, DTYPES[part.dtype or dtype]):
                stream.write(chunk.data)
                advance(chunk.nbytes)


def bytes_of(parts: Sequence[Part], dtype: str) -> int:
    """What they take, without the header."""
    return sum(math.prod(part.shape) * DTYPES[part.dtype or dtype].itemsize for part in parts)


def _header(parts: Sequence[Part], dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for part in parts:
        end = at + bytes_of([part], dtype)
        entries[part.name] = {
            "dtype": part.dtype or dtype,
            "shape": list(part.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _chunks(part: Part, source: TensorFiles, dtype: np.dtype) -> Iterator[Array]:  # type: ignore[type-arg]
    written = 0
    for piece in part.slices:
        for rows in _rows(piece, source[piece.tensor]):
            chunk = np.ascontiguousarray(rows.astype(dtype, copy=False))
            written += chunk.size
            yield chunk.reshape(-1).view(np.uint8)
    missing = math.prod(part.shape) - written
    if missing:
        yield np.zeros(missing, dtype).view(np.uint8)


def _rows(piece: Slice, tensor: Array) -> Iterator[Array]:
    low, high = piece.rows
    if tensor.ndim == 1:
        yield tensor[low:high]
        return
    columns = slice(*piece.columns) if piece.columns else slice(None)
    step = max(1, _CHUNK_BYTES // (tensor.shape[1] * tensor.itemsize))
    for at in range(low, high, step):
        yield tensor[at : min(at + step, high), columns]
