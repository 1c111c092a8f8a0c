"""Tensors as bytes, the way KServe v2 carries them in `raw_input_contents` and `raw_output_contents`.

Little-endian; a BYTES element is a 4-byte length and that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

# datatype -> struct code
NUMBERS = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip


def encode(datatype: str, values: Sequence[bytes | str | bool | int | float]) -> bytes:
    """
    >>> encode("INT32", [7]), encode("BYTES", ["hé"])
    (b'\\x07\\x00\\x00\\x00', b'\\x03\\x00\\x00\\x00h\\xc3\\xa9')
    """
    if datatype != "BYTES":
        return struct.pack(f"<{len(values)}{NUMBERS[datatype]}", *values)
    parts = []
    for value in values:
        data = value.encode() if isinstance(value, str) else value
        if not isinstance(data, bytes):
            raise TypeError(f"{value!r}: BYTES takes str or bytes")
        parts += [len(data).to_bytes(4, "little"), data]
    return b"".join(parts)


def decode_bytes(raw: bytes) -> list[bytes]:
    """
    >>> decode_bytes(b"\\x03\\x00\\x00\\x00h\\xc3\\xa9")
    [b'h\\xc3\\xa9']
    """
    if len(raw) >= 4 and int.from_bytes(raw[:4], "little") == len(raw) - 4:
        return [raw[4:]]  # one element, as nearly always
    values, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        end = at + 4 + length
        if end > len(raw):
            raise ValueError(f"element of {length} bytes at {at}, but only {len(raw)} bytes in all")
        values.append(raw[at + 4 : end])
        at = end
    return values


def decode_numbers(datatype: str, raw: bytes) -> tuple[float, ...]:
    """
    >>> decode_numbers("INT32", b"\\x07\\x00\\x00\\x00")
    (7,)
    """
    code = NUMBERS[datatype]
    return struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)
