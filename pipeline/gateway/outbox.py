"""What goes out to one reader: at once where tokens come one by one, together where they come faster than that.

A write costs more than a token. Between two writes lies a millisecond at least, so that nobody waits longer for it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Send

_REST_S = 0.001
_MOST_WAITING = 64  # bodies; then whoever puts more waits for the reader


class Outbox:
    """The body of one response, as a context manager.

    On leaving it without an error, all has been handed on and the body is complete, or what sending raised is raised.
    """

    def __init__(self, send: Send) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._bodies: list[bytes] = []
        self._rests_until = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    async def put(self, body: bytes) -> None:
        """Hand on, now or soon."""
        self._bodies.append(body)
        if self._writing is not None:
            if len(self._bodies) >= _MOST_WAITING:
                await asyncio.wait([self._writing])
            if not self._writing.done():
                return
            self._written()
        if self._timer is None:
            if self._loop.time() >= self._rests_until:
                await self._flush()
            else:
                self._timer = self._loop.call_at(self._rests_until, self._due)

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

    def _due(self) -> None:
        self._timer = None
        self._writing = self._loop.create_task(self._flush())

    def _written(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    async def _flush(self) -> None:
        while self._bodies:
            body = b"".join(self._bodies)
            self._bodies.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self._rests_until = self._loop.time() + _REST_S
