"""A scripted HTTP/2 server: it says exactly what a test tells it to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import hpack
import pytest

from pipeline.client import KeepAlive
from pipeline.client.http2 import EOF, Call, Calls
from pipeline.client.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PREFACE,
    Frame,
    Kind,
    Reader,
    frame,
    settings,
)

WITHIN_S = 20
Peer = Callable[["Server"], Awaitable[None]]


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), WITHIN_S))

    return run


class Server:
    """One connection, from the server's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._frames = reader, writer, Reader()
        self.seen: list[Frame] = []
        self._hpack = hpack.Encoder()

    def send(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))

    def headers(self, stream: int, fields: dict[str, str], flags: int = END_HEADERS) -> bytes:
        return frame(Kind.HEADERS, flags, stream, self._hpack.encode(fields.items()))

    def answer(self, stream: int, *messages: bytes, status: str = "0") -> None:
        """A whole answer, as gRPC's servers give it."""
        self.send(self.headers(stream, {":status": "200", "content-type": "application/grpc"}))
        self.send(*(frame(Kind.DATA, 0, stream, packed(message)) for message in messages))
        self.send(self.headers(stream, {"grpc-status": status}, END_HEADERS | END_STREAM))

    async def until(self, kind: Kind, wanted: Callable[[Frame], bool] = lambda _: True) -> Frame:
        """The next frame of a kind that came or comes."""
        while True:
            for at, one in enumerate(self.seen):
                if one[0] == kind and wanted(one):
                    return self.seen.pop(at)
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self.seen += self._frames.feed(data)

    async def request(self) -> int:
        """The stream of the next call, whose request has come."""
        _, _, stream, _ = await self.until(Kind.HEADERS)
        await self.until(Kind.DATA, lambda one: one[2] == stream and bool(one[1] & END_STREAM))
        return stream


def packed(message: bytes) -> bytes:
    return b"\x00" + len(message).to_bytes(4, "big") + message


@asynccontextmanager
async def calls(peer: Peer, *, first: bytes | None = None, **settings_: Any) -> AsyncIterator[Calls]:
    """Calls to a server that does what `peer` does on each connection, once greetings are exchanged."""
    failures: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = Server(reader, writer)
        try:
            assert await reader.readexactly(len(PREFACE)) == PREFACE
            server.send(settings({}) if first is None else first)
            await peer(server)
        except (ConnectionError, EOFError):
            pass
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    made = Calls(
        f"127.0.0.1:{port}", "/s/m", encode=bytes, decode=bytes, **{"keep_alive": KeepAlive(), **settings_}
    )
    try:
        yield made
    finally:
        made.close()
        listening.close()
    assert not failures


async def everything(call: Call) -> list[bytes]:
    messages = []
    while (message := await call.read()) is not EOF:
        messages.append(message)
    return messages


async def failure(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await everything(call)
    return raised.value
