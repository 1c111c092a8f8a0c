"""As `flights`, for asyncio: one generation for all equal requests of an event loop.

A task of its own reads it, because cancelling whoever reads a gRPC call cancels the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pipeline.client import AsyncStream, Chunk


class AsyncFlight:
    """An answer that is being generated, for the tasks of one event loop."""

    def __init__(self, stream: AsyncStream, landed: Callable[[AsyncFlight], Awaitable[None]]) -> None:
        """`landed` is called once, when the answer is complete; the last passenger to leave waits for it."""
        self.stream = stream
        self.chunks: list[Chunk] = []
        self.times: list[float] = []  # of arrival, on the clock of `perf_counter`
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        self.over = False
        self.passengers = 0
        self._landed = landed
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._fly())

    async def leave(self) -> bool:
        """Whether nobody is left: the generation then ends, on the server too."""
        self.passengers -= 1
        if self.passengers:
            return False
        if not self.over:
            self._task.cancel()
        await asyncio.wait([self._task])
        return True

    async def read(self, at: int) -> Chunk | None:
        """Chunk number `at`, waiting for it; None after the last one. Raises what the generation raised."""
        while at >= len(self.chunks):
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            await self._changed.wait()
        return self.chunks[at]

    async def _fly(self) -> None:
        try:
            async with self.stream as stream:
                async for chunk in stream:
                    self.chunks.append(chunk)
                    self.times.append(time.perf_counter())
                    self._wake()
            self.over = True
            self._wake()
            await self._landed(self)
        except BaseException as error:
            self.error = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.over = True
            self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again; who waits next, waits for the next change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class AsyncFlights:
    """Those that are under way, by the key of their question."""

    def __init__(self) -> None:
        self._flights: dict[bytes, AsyncFlight] = {}

    def join(self, key: bytes, make: Callable[[], AsyncFlight]) -> tuple[AsyncFlight, bool]:
        """The flight of a key, boarded; and whether it has just been made."""
        flight = self._flights.get(key)
        first = flight is None or flight.over or not flight.passengers
        if flight is None or first:
            flight = self._flights[key] = make()
        flight.passengers += 1
        return flight, first

    async def leave(self, key: bytes, flight: AsyncFlight) -> None:
        """Leave; a flight without passengers takes nobody on any more."""
        if flight.passengers == 1 and self._flights.get(key) is flight:
            del self._flights[key]
        await flight.leave()
