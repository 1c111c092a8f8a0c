"""Frames of HTTP/2 (RFC 9113, section 4 and 6), and header blocks as they are sent (RFC 7541). No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
MAX_FRAME_BYTES = 16_384  # what each side takes unless it says otherwise; we never do
DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1

ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20

Frame = tuple[int, int, int, bytes]  # kind, flags, stream, payload


class Kind(IntEnum):
    """Of frames."""

    DATA = 0x0
    HEADERS = 0x1
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


class Setting(IntEnum):
    """What one side tells the other."""

    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC


class Malformed(Exception):
    """The other side does not speak HTTP/2, or wrongly."""


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """
    >>> frame(Kind.PING, ACK, 0, b"12345678").hex(" ", 1)
    '00 00 08 06 01 00 00 00 00 31 32 33 34 35 36 37 38'
    """
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream) + payload


def settings(values: Mapping[Setting, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(struct.pack(">HI", *pair) for pair in values.items())
    return frame(Kind.SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> dict[int, int]:
    """What a SETTINGS frame says."""
    if len(payload) % 6:
        raise Malformed(f"a SETTINGS frame of {len(payload)} bytes")
    return dict(struct.iter_unpack(">HI", payload))


def window_update(stream: int, size: int) -> bytes:
    """That so many bytes more may be sent to us."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset(stream: int, code: Code) -> bytes:
    """The end of a stream."""
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """Header fields as literals that nobody remembers: no state, hence the same bytes each time.

    >>> header_block([("te", "trailers")])
    b'\\x00\\x02te\\x08trailers'
    """
    return b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)


def header_frames(stream: int, block: bytes) -> bytes:
    """A header block in as many frames as it needs."""
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    last = len(parts) - 1
    return b"".join(
        frame(Kind.CONTINUATION if at else Kind.HEADERS, END_HEADERS if at == last else 0, stream, part)
        for at, part in enumerate(parts)
    )


def unpadded(kind: int, flags: int, payload: bytes) -> bytes:
    """The content of a DATA or HEADERS frame."""
    padding = 0
    if flags & PADDED:
        padding, payload = payload[0], payload[1:]
    if kind == Kind.HEADERS and flags & PRIORITY:
        payload = payload[5:]
    if padding > len(payload):
        raise Malformed("more padding than there is content")
    return payload[: len(payload) - padding]


class Reader:
    """Cuts what a connection brings into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Malformed if they are none."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES:
            head = int.from_bytes(data[at : at + HEAD_BYTES], "big")
            size = head >> 48
            if size > MAX_FRAME_BYTES:
                raise Malformed(f"a frame of {size} bytes")
            if end - at < HEAD_BYTES + size:
                break
            begin = at + HEAD_BYTES
            at = begin + size
            yield head >> 40 & 0xFF, head >> 32 & 0xFF, head & MAX_WINDOW, data[begin:at]
        self._rest = data[at:]


def _literal(text: str) -> bytes:
    value = text.encode()
    size = len(value)
    if size < 0x7F:
        return bytes([size]) + value
    size -= 0x7F
    head = bytearray([0x7F])
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + value
