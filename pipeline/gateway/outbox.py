"""What goes out to one reader: at once where tokens come one by one, together where they come faster than that.

A write costs more than a token. Between two writes lies a millisecond at least, so that nobody waits longer for it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Send

_REST_S = 0.001


class Outbox:
    """A context manager; on leaving, everything has been handed on, or it raises what sending raised."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._bodies: list[bytes] = []
        self._more = asyncio.Event()

    def put(self, body: bytes) -> None:
        """Hand on, soon."""
        self._bodies.append(body)
        self._more.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
        if self._bodies:
            await self._flush()

    async def _work(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._flush()
            await asyncio.sleep(_REST_S)

    async def _flush(self) -> None:
        body = b"".join(self._bodies)
        self._bodies.clear()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
