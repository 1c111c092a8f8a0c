"""Tensors to a safetensors file one after the other, a few rows at a time: memory stays small, whatever their size.

Format: https://github.com/huggingface/safetensors, version 0.x.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.errors import StageError
from pipeline.models.tensors import DTYPES, Array, Tensors
from pipeline.runtimes.tensorrt.checkpoint.parts import Part, Scale, Slice

_CHUNK_BYTES = 32 * 2**20
_ALIGNMENT = 8  # of the first tensor, as the reference implementation pads its header
_FLOATS = ("F32", "F16", "BF16")  # may become each other; quantized weights may not


def write_rank(
    file: Path, parts: Sequence[Part | Scale], source: Tensors, dtype: str, advance: Callable[[int], None]
) -> None:
    """Write one rank.

    Args:
        dtype: of tensors that name none: "BF16" or "F16".
        advance: told the bytes as they are written.

    Raises:
        StageError: a source tensor is of a type that cannot become the rank's, or scales differ that must not.
    """
    with file.open("wb") as stream:
        stream.write(_header(parts, dtype))
        for part in parts:
            kind = part.dtype or dtype
            chunks = _scales(part, source) if isinstance(part, Scale) else _chunks(part, source, kind)
            for chunk in chunks:
                stream.write(chunk.data)
                advance(chunk.nbytes)


def bytes_of(parts: Sequence[Part | Scale], dtype: str) -> int:
    """What they take, without the header."""
    return sum(math.prod(part.shape) * DTYPES[part.dtype or dtype].itemsize for part in parts)


def _header(parts: Sequence[Part | Scale], dtype: str) -> bytes:
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


def _scales(scale: Scale, source: Tensors) -> Iterator[Array]:
    values = []
    for group in scale.groups:
        found = np.array([source[name].astype(np.float32).reshape(()) for name in group])
        if scale.same and not (found == found[0]).all():
            raise StageError(f"{scale.name}: {', '.join(group)} must be equal, and are {found.tolist()}")
        values.append(max(found.max(), scale.least))
    yield np.array(values, np.float32).view(np.uint8)


def _chunks(part: Part, source: Tensors, kind: str) -> Iterator[Array]:
    written, dtype = 0, DTYPES[kind]
    for piece in part.slices:
        given = source.headers[piece.tensor].dtype
        if given != kind and not (given in _FLOATS and kind in _FLOATS):
            raise StageError(f"{piece.tensor} is {given}, which cannot be stored as {kind}")
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
