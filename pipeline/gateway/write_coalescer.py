"""What goes out to one reader: at once where tokens come one by one, together where they come faster than that.

A write costs more than a token. Between two writes lies a millisecond at least, so that nobody waits longer for it.

The model does not wait for its reader: what it says is kept here, so that its place in the engine is free as soon as
the generation ends, however slowly the answer is read. Who leaves too much unread for too long is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Send

_REST_S = 0.001
_WRITE_BYTES = 64 * 1024
_MAX_UNREAD_BYTES = 4 * 2**20
_PATIENCE_S = 10.0


class Peer(Protocol):
    """The connection on which an answer goes out."""

    @property
    def congested(self) -> bool:
        """Whether sending has to wait for the reader."""
        ...

    def abort(self) -> None:
        """End it now, whatever has not been read."""
        ...


class ReaderTooSlow(Exception):
    """More was left unread than is kept for a reader, for longer than it is waited for."""

    def __init__(self) -> None:
        super().__init__("the answer was not read as fast as it came")


class Outbox:
    """The body of one response, as a context manager.

    On leaving it without an error, all has been handed on and the body is complete, or what sending raised is raised.
    """

    def __init__(
        self,
        send: Send,
        peer: Peer | None = None,
        *,
        max_unread_bytes: int = _MAX_UNREAD_BYTES,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """
        Args:
            peer: without it, sending is taken to wait for nobody.
            max_unread_bytes: that are kept; who puts more waits for the reader.
            patience_s: how long all those that put wait in sum.
        """
        self._send, self._peer, self._loop = send, peer, asyncio.get_running_loop()
        self._max_unread_bytes, self._patience_s = max_unread_bytes, patience_s
        self._bodies: deque[bytes] = deque()
        self._unread_bytes = 0
        self._rests_until = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._room = asyncio.Event()  # something was taken

    async def put(self, body: bytes) -> None:
        """Hand on, now or soon.

        Raises:
            ReaderTooSlow: it leaves too much unread, for too long.
        """
        self._bodies.append(body)
        self._unread_bytes += len(body)
        if self._writing is not None:
            while self._unread_bytes > self._max_unread_bytes and not self._writing.done():
                await self._wait_for_room()
            if not self._writing.done():
                return
            self._written()
        if self._timer is None:
            if self._loop.time() < self._rests_until:
                self._timer = self._loop.call_at(self._rests_until, self._due)
            elif self._peer is not None and self._peer.congested:
                self._due()
            else:
                await self._flush()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            if kind is not None:
                self._writing.cancel()
            await asyncio.wait([self._writing])
        if kind is None:
            self._written()
            await self._send({"type": "http.response.body", "body": b"".join(self._bodies)})

    async def _wait_for_room(self) -> None:
        began = self._loop.time()
        self._room.clear()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._room.wait()
        except TimeoutError:
            raise ReaderTooSlow() from None
        finally:
            self._patience_s -= self._loop.time() - began

    def _due(self) -> None:
        self._timer = None
        self._writing = self._loop.create_task(self._flush())

    def _written(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    async def _flush(self) -> None:
        try:
            while self._bodies:
                parts, size = [], 0
                while self._bodies and size < _WRITE_BYTES:
                    parts.append(self._bodies.popleft())
                    size += len(parts[-1])
                await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                self._unread_bytes -= size
                self._room.set()
                self._rests_until = self._loop.time() + _REST_S
        finally:
            self._room.set()  # whoever waits learns that nothing is written any more
