"""Connections of clients over HTTP/1.1, with limits on their number, headers and slowness.

Written against uvicorn 0.32 to 0.54, whose protocol limits neither headers nor the time of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pipeline.gateway.errors import ApiError

OnRefusal = Callable[[ApiError], None]

_PROGRESS_BYTES = 16 * 1024
_NO_LINGER = pack("ii", 1, 0)
# Headers of which a request has one at most: RFC 9110 (5.3, 7.2), RFC 9112 (6.3), RFC 6454; and those that bear keys.
_SINGLE = frozenset(
    (
        b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"authorization",
        b"api-key", b"x-api-key", b"origin", b"expect", b"inference-header-content-length",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on clients that send slowly, send too much, or do not read; see `ClientConnection`.

    Attributes:
        connections: connections open at once.
        header_bytes: bytes of the headers of one request, with its URL.
        headers: number of headers of one request.
        header_s: seconds from connecting, or from the first byte of a request, to the end of its headers.
        body_s: seconds from there to the end of its body.
        write_s: seconds in which a client reads 16 KiB of what waits for it, or all of it.
    """

    connections: int = 1024
    header_bytes: int = 64 * 1024
    headers: int = 128
    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 30.0


class Connections:
    """All connections of one server.

    If there are too many, one without a request is closed: the oldest of the address that has the most of them, so that
    no client keeps others out.
    """

    def __init__(self, limits: ConnectionLimits, on_refusal: OnRefusal) -> None:
        """`on_refusal` is called with the error of each request that is refused before it reaches the application."""
        self.limits, self.on_refusal = limits, on_refusal
        self._open = 0
        self._idle: dict[str, dict[ClientConnection, None]] = {}  # by address, the oldest first

    def enter(self, connection: ClientConnection) -> bool:
        """Add a connection.

        Returns:
            False if it has to be closed, because requests are under way on all others.
        """
        self._open += 1
        if self._open > self.limits.connections:
            most = max(self._idle.values(), key=len, default=None)
            if most is None:
                return False
            next(iter(most)).drop()
        self.mark_idle(connection)
        return True

    def leave(self, connection: ClientConnection) -> None:
        """Remove a connection."""
        self._open -= 1
        self.mark_busy(connection)

    def mark_idle(self, connection: ClientConnection) -> None:
        """Note that no request is under way on a connection."""
        self._idle.setdefault(connection.address, {})[connection] = None

    def mark_busy(self, connection: ClientConnection) -> None:
        """Note that a request is under way on a connection, or that it is being closed."""
        others = self._idle.get(connection.address, {})
        others.pop(connection, None)
        if not others:
            self._idle.pop(connection.address, None)


class _ReadState(Enum):
    """Part of a request that has not been received yet."""

    NOTHING = 0
    HEADERS = 1
    BODY = 2


class ClientConnection(HttpToolsProtocol):
    """A client's connection, within limits. Applications find it in scope["peer"], a `pipeline.gateway.api.sse.Peer`.

    If a body does not come in time, scope["late"] is set, and the application that waits for it is woken.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.address = ""
        self._all, self._limits = connections, connections.limits
        self._awaited, self._since = _ReadState.HEADERS, self.loop.time()
        self._header_bytes = 0  # of headers that are complete
        self._begun_bytes = 0  # of a request whose headers are not complete
        self._fault: ApiError | None = None  # if the headers are too large
        self._unread, self._unread_since = 0, self._since  # bytes that wait for the client

    @property
    def congested(self) -> bool:
        """Whether the next write has to wait for the client to read."""
        return self.flow.write_paused

    def abort(self) -> None:
        """End the connection now. What has not been read is lost; to the application, the client has left."""
        if self not in self.connections:
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
        self._all.mark_busy(self)
        # Else the kernel goes on offering the client what it has not read.
        self.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def drop(self) -> None:
        """End the connection while no request is under way."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self._all.mark_busy(self)
            self.transport.close()

    def check(self, now: float) -> None:
        """End the connection if the client is late; called about twice a second with the loop's time."""
        idle, limits = self.cycle is None or self.cycle.response_complete, self._limits
        if self._is_stalled(now, idle=idle):
            self.abort()
        elif self._awaited is _ReadState.HEADERS and idle and now - self._since > limits.header_s:
            if self._begun_bytes:
                self._refuse(ApiError(408, f"The headers did not come within {limits.header_s:g} s"))
            else:
                self.drop()
        elif self._awaited is _ReadState.BODY and not self.pipeline and now - self._since > limits.body_s:
            if self.cycle.response_started:
                self.abort()
            else:
                cast(dict[str, Any], self.scope)["late"] = True
                self.cycle.message_event.set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._all.enter(self):
            self._refuse(ApiError(503, "Too many connections are open", code="overloaded", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._awaited is _ReadState.NOTHING:
            self._awaited, self._since, self._begun_bytes = _ReadState.HEADERS, self.loop.time(), 0
        super().data_received(data)
        if self._awaited is _ReadState.HEADERS:
            self._begun_bytes += len(data)
            if self._begun_bytes > self._limits.header_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)["peer"] = self
        self._header_bytes = 0
        # Several requests may have come together.
        if self._awaited is _ReadState.NOTHING:
            self._awaited, self._since, self._begun_bytes = _ReadState.HEADERS, self.loop.time(), 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if (lower := name.lower()) in _SINGLE and any(lower == other for other, _ in self.headers):
            # Whoever stands before this may have taken the other one.
            self._fault = ApiError(400, f"The header {lower.decode()} stands twice")
            raise ValueError(self._fault.message)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._awaited, self._since = _ReadState.BODY, self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaited = _ReadState.NOTHING
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._all.mark_busy(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._all.mark_idle(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._fault or ApiError(400, msg))

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes or len(self.headers) >= self._limits.headers:
            self._fault = self._too_large()
            # This ends the parser, whereupon uvicorn calls `send_400_response`.
            raise ValueError(self._fault.message)

    def _too_large(self) -> ApiError:
        most = f"{self._limits.headers} headers and {self._limits.header_bytes} bytes"
        return ApiError(431, f"The headers are too large: a request has at most {most} of them")

    def _is_stalled(self, now: float, *, idle: bool) -> bool:
        unread = self.transport.get_write_buffer_size()
        waits = unread and (idle or self.flow.write_paused or self.transport.is_closing())
        if not waits or unread <= self._unread - _PROGRESS_BYTES:
            self._unread, self._unread_since = unread, now
        return now - self._unread_since > self._limits.write_s

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and end the connection."""
        if self.transport.is_closing():
            return
        self._all.mark_busy(self)
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.abort()
            return
        self._all.on_refusal(error)
        response = error.response()
        headers = {**dict(response.raw_headers), b"connection": b"close"}
        lines = b"".join(b"%s: %s\r\n" % header for header in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + bytes(response.body))
        self.transport.close()
