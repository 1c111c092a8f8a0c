"""The calls of one method of one server, over as many connections as its limits make necessary: one as a rule."""

from __future__ import annotations

import asyncio
import base64
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from pipeline.client.channel import KeepAlive
from pipeline.client.http2.call import Call
from pipeline.client.http2.connection import Connection
from pipeline.client.http2.frames import header_block

_CONNECT_S = 20  # as gRPC has it
_NAME, _VALUE = re.compile(r"[0-9a-z_.-]+"), re.compile(r"[ -~]*")


class Calls:
    """Callable as gRPC's own are: with a request and metadata; a call is there at once, whatever becomes of it."""

    def __init__(
        self,
        url: str,
        method: str,
        *,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], Any],
        keep_alive: KeepAlive,
    ) -> None:
        """`url`: host:port."""
        host, _, port = url.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._url, self._keep_alive = url, keep_alive
        self._encode, self._decode = encode, decode
        head = {
            ":method": "POST", ":scheme": "http", ":path": method, ":authority": url, "te": "trailers",
            "content-type": "application/grpc", "user-agent": "pipeline",
        }  # fmt: skip
        self._head = header_block(head.items())
        self._connections: list[Connection] = []
        self._waiting: deque[Call] = deque()
        self._opening: asyncio.Task[None] | None = None

    def __call__(self, request: Any, metadata: Iterable[tuple[str, str | bytes]] = ()) -> Call:
        block = self._head + header_block(_checked(name, value) for name, value in metadata)
        call = Call(block, self._encode(request), self._decode)
        self._waiting.append(call)
        self._advance()
        return call

    def close(self) -> None:
        """Ends all connections; calls that are under way are cancelled."""
        if self._opening is not None:
            self._opening.cancel()
        self._fail_waiting(grpc.StatusCode.CANCELLED, "the client is closed")
        for connection in list(self._connections):
            connection.close()

    def _advance(self) -> None:
        """Send what can be sent; where nothing takes the rest, open a connection."""
        self._connections = [one for one in self._connections if one.usable]
        for connection in self._connections:
            while self._waiting and connection.has_room:
                call = self._waiting.popleft()
                if not call.over:  # cancelled before
                    connection.begin(call)
        if self._waiting and self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await self._connected()
        except OSError as error:
            text = "timed out" if isinstance(error, TimeoutError) else error
            self._fail_waiting(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self._url}: {text}")
        else:
            connection.on_room = self._advance
            self._connections.append(connection)
            if not connection.has_room:
                self._fail_waiting(grpc.StatusCode.UNAVAILABLE, f"{self._url} takes no calls")
        finally:
            self._opening = None
        self._advance()

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._keep_alive), *self._address)
        try:
            await connection.ready
        except BaseException:
            connection.close()
            raise
        return connection

    def _fail_waiting(self, status: grpc.StatusCode, why: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(status, why)


def _checked(name: str, value: str | bytes) -> tuple[str, str]:
    """Metadata as headers; what is binary goes as base64."""
    if name.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        value = base64.b64encode(raw).decode()
    if isinstance(value, bytes):
        value = value.decode("ascii")
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ValueError(f"{name!r}: {value!r} cannot be sent as metadata")
    return name, value
