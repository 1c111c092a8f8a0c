"""Relays connections of gRPC clients to the socket that Triton listens on, but for messages that harm it.

Triton takes messages of 2 GiB, and decompresses what is compressed (`MAX_GRPC_MESSAGE_SIZE` in its src/common.h): half
a megabyte on the wire can become half a gigabyte, of which it keeps a copy for the next request. One of 60 bytes ends
it: a request that asks for an output's 2^40 likeliest classes. So what clients send is looked at while it passes:
frames of HTTP/2 (RFC 9113, section 4.1), and the messages in them
(https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md). The last byte of a message waits until it has been
looked at. Every byte goes on as it came, or the connection ends. What Triton sends is not looked at.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

_log = logging.getLogger(__name__)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5
_DATA, _RST_STREAM = 0x0, 0x3
_END_STREAM, _PADDED = 0x1, 0x8
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of what a client may send.

    Attributes:
        message_bytes: Longest message.
        decompressed_bytes: Longest message after it was decompressed.
        begun_bytes: Messages of all connections that have begun and not ended, together.
        begun: Number of these on one connection.
        connections: Connections open at once.
    """

    message_bytes: int = 64 * 2**20
    decompressed_bytes: int = 16 * 2**20
    begun_bytes: int = 512 * 2**20
    begun: int = 1024
    connections: int = 512


class MessageRefused(Exception):
    """A client sent what it may not; the text says what."""


@dataclass(slots=True)
class _Message:
    """The message that comes on a stream.

    Attributes:
        head: As much of its prefix as has come.
        content: As much of the rest as has come.
        left: Bytes that are still to come after the prefix.
    """

    head: bytes = b""
    content: bytearray = field(default_factory=bytearray)
    left: int = 0


@dataclass(slots=True)
class MessageTotal:
    """Bytes of all messages that have begun and not ended."""

    size: int = 0


@dataclass(slots=True)
class MessageInspector:
    """Follows the messages in what one client sends. `feed` takes the bytes as they come, in pieces of any size."""

    limits: MessageLimits
    total: MessageTotal = field(default_factory=MessageTotal)
    _preface: bytes = _PREFACE
    _head: bytes = b""
    _kind: int = 0
    _flags: int = 0
    _stream: int = 0
    _payload: int = 0  # bytes of the frame that are still to come
    _padding: int = 0  # of which these are the last
    _pad_length_due: bool = False
    _messages: dict[int, _Message] = field(default_factory=dict)

    def feed(self, data: bytes) -> None:
        """Take in what came. Raises MessageRefused if it may not go on."""
        position = len(self._preface)
        if position:
            if not data.startswith(self._preface[: len(data)]):
                raise MessageRefused("it does not speak HTTP/2")
            self._preface = self._preface[len(data) :]
        while position < len(data):
            position = (
                self._feed_payload(data, position) if self._payload else self._feed_head(data, position)
            )

    def _feed_head(self, data: bytes, position: int) -> int:
        end = position + _FRAME_HEAD - len(self._head)
        self._head += data[position:end]
        if len(self._head) == _FRAME_HEAD:
            high, low, self._kind, self._flags, stream = struct.unpack(">BHBBI", self._head)
            self._payload, self._stream, self._head = high << 16 | low, stream & 0x7FFFFFFF, b""
            self._pad_length_due = self._kind == _DATA and bool(self._flags & _PADDED) and self._payload > 0
            self._padding = 0
            if not self._payload:
                self._end_frame()
        return min(end, len(data))

    def _feed_payload(self, data: bytes, position: int) -> int:
        if self._pad_length_due:
            self._pad_length_due, self._padding = False, data[position]
            end = position + 1
        else:
            end = min(len(data), position + self._payload)
            if self._kind == _DATA:
                own = min(end - position, max(0, self._payload - self._padding))
                self._feed_messages(data, position, position + own)
        self._payload -= end - position
        if not self._payload:
            self._end_frame()
        return end

    def _feed_messages(self, data: bytes, position: int, end: int) -> None:
        message = self._messages.get(self._stream)
        while position < end:
            if message is None:
                message = self._messages[self._stream] = _Message()
                if len(self._messages) > self.limits.begun:
                    raise MessageRefused(f"more than {self.limits.begun} messages have begun, and not ended")
            if message.left:
                taken = min(message.left, end - position)
                message.content += data[position : position + taken]
                message.left -= taken
            else:
                taken = min(_MESSAGE_HEAD - len(message.head), end - position)
                message.head += data[position : position + taken]
                if len(message.head) < _MESSAGE_HEAD:
                    return
                message.left = self._length(message.head)
            position += taken
            if not message.left:
                self._forget(self._stream)
                check_message(bytes(message.content), compressed=bool(message.head[0]), limits=self.limits)
                message = None

    def _length(self, head: bytes) -> int:
        length = int(struct.unpack(">xI", head)[0])
        if length > self.limits.message_bytes:
            raise MessageRefused(f"a message of {length} bytes is longer than {self.limits.message_bytes}")
        if self.total.size + length > self.limits.begun_bytes:
            raise MessageRefused(f"messages of more than {self.limits.begun_bytes} bytes have begun")
        self.total.size += length
        return length

    def _end_frame(self) -> None:
        if self._kind == _RST_STREAM or (self._kind == _DATA and self._flags & _END_STREAM):
            self._forget(self._stream)

    def _forget(self, stream: int) -> None:
        message = self._messages.pop(stream, None)
        if message is not None:
            self.total.size -= message.left + len(message.content)

    def close(self) -> None:
        """Forget all messages: the connection has ended."""
        for stream in tuple(self._messages):
            self._forget(stream)


def check_message(content: bytes, *, compressed: bool, limits: MessageLimits) -> None:
    """Look at a message of any method, perhaps compressed by gzip or deflate.

    Raises:
        MessageRefused: it would harm Triton.
    """
    if compressed:
        unpacking = zlib.decompressobj(wbits=47)
        try:
            content = unpacking.decompress(content, limits.decompressed_bytes)
        except zlib.error as error:
            raise MessageRefused("a message is compressed in a way that is not known") from error
        if not unpacking.eof:
            raise MessageRefused(f"a message becomes longer than {limits.decompressed_bytes} bytes")
    try:
        outputs = _OUTPUTS.FromString(content).outputs
    except DecodeError as error:
        raise MessageRefused("a message is malformed") from error
    if any(b"classification" in output for output in outputs):
        raise MessageRefused("a request asks for the classes of an output, which can end Triton")


def _outputs_class() -> Any:
    """Make a message that has nothing but `outputs` of the protocol's ModelInferRequest, each as it is on the wire.

    No other message of the protocol has a field of that number.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="pipeline/outputs.proto", package="pipeline", syntax="proto3"
    )
    field = file.message_type.add(name="Outputs").field.add(name="outputs", number=6)
    field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("pipeline.Outputs"))


_OUTPUTS = _outputs_class()


class GrpcRelay:
    """Serves a gRPC port: connects each client to the socket of Triton, and passes bytes both ways."""

    def __init__(self, socket_path: str, limits: MessageLimits | None = None) -> None:
        self.limits, self.total = limits or MessageLimits(), MessageTotal()
        self._path = socket_path
        self._open: set[_Client] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def connection(self) -> asyncio.Protocol:
        """Make the protocol of a client's connection, for `loop.create_server`."""
        return _Client(self)

    def enter(self, client: _Client) -> None:
        """Take a connection in, or close it if there are too many."""
        if len(self._open) >= self.limits.connections:
            client.close()
            return
        self._open.add(client)
        task = asyncio.ensure_future(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def leave(self, client: _Client) -> None:
        """Forget a connection that was lost."""
        self._open.discard(client)

    async def _connect(self, client: _Client) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                connecting = asyncio.get_running_loop().create_unix_connection(
                    lambda: _Upstream(client), self._path
                )
                await connecting
        except OSError:
            # Triton is being started; the client tries again.
            client.close()


class _Side(asyncio.Protocol):
    """One of two connections that belong together: what it receives, the other one sends."""

    def __init__(self) -> None:
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None, "they have met"
        assert self.other.transport is not None, "it is connected"
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        if (
            self.other is not None
            and self.other.transport is not None
            and self.other.transport.can_write_eof()
        ):
            self.other.transport.write_eof()
            return True
        return False

    def pause_writing(self) -> None:
        if (reading := self._read_from) is not None:
            reading.pause_reading()

    def resume_writing(self) -> None:
        if (reading := self._read_from) is not None:
            reading.resume_reading()

    @property
    def _read_from(self) -> asyncio.Transport | None:
        transport = None if self.other is None else self.other.transport
        return None if transport is None or transport.is_closing() else transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Close the connection, when what waits to be sent has been."""
        if self.transport is not None:
            self.transport.close()


class _Client(_Side):
    """The connection of a client."""

    def __init__(self, relay: GrpcRelay) -> None:
        super().__init__()
        self._relay, self._inspector = relay, MessageInspector(relay.limits, relay.total)
        self._early = b""  # came before Triton's connection was made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._relay.enter(self)

    def meet(self, upstream: _Upstream) -> bytes:
        """Go on with the connection to Triton. Returns what has to be sent there first."""
        assert self.transport is not None, "it was connected before"
        self.other, early, self._early = upstream, self._early, b""
        if early:
            self.transport.resume_reading()
        return early

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None, "it is connected"
        try:
            self._inspector.feed(data)
        except MessageRefused as error:
            peer = self.transport.get_extra_info("peername") or ("?",)
            _log.warning("gRPC: the connection of %s is closed: %s", peer[0], error)
            self.transport.abort()
            return
        if self.other is not None:
            super().data_received(data)
        elif not self.transport.is_closing():
            self._early += data
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.leave(self)
        self._inspector.close()
        super().connection_lost(exc)


class _Upstream(_Side):
    """The connection to Triton that belongs to a client's."""

    def __init__(self, client: _Client) -> None:
        super().__init__()
        self.other, self._client = client, client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None, "it was just made"
        if self._client.transport is None or self._client.transport.is_closing():
            self.close()
        else:
            self.transport.write(self._client.meet(self))
