"""One generation for all equal requests that run at the same time.

Whoever comes first takes off; who asks the same meanwhile boards, and sees every chunk from the beginning. The
generation goes on as long as one passenger is left, and ends early when the last one leaves.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from pipeline.client import Answer, AsyncStream, Cached, Cancelled, Chunk, FinishReason, Stats, Stream


class Flight:
    """An answer that is being generated, for threads.

    There is no thread of its own: whichever passenger needs the next chunk reads it from the model for all of them.
    """

    def __init__(self, stream: Stream, landed: Callable[[Flight], None]) -> None:
        """`landed` is called once, when the answer is complete, before anybody sees its end."""
        self.stream = stream
        self.chunks: list[Chunk] = []
        self.times: list[float] = []  # of arrival, on the clock of `perf_counter`
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        self.over = False
        self._landed = landed
        self._passengers = 0
        self._entered = False
        self._reading = threading.Lock()  # held by the passenger who reads for all
        self._changed = threading.Condition()

    @property
    def passengers(self) -> int:
        """How many wait for it."""
        return self._passengers

    def board(self) -> bool:
        """Join; False if it is too late."""
        with self._changed:
            if self.over and self.error is not None:
                return False
            self._passengers += 1
            return True

    def leave(self) -> bool:
        """Whether nobody is left: the generation then ends, on the server too."""
        with self._changed:
            self._passengers -= 1
            if self._passengers:
                return False
            if not self.over:
                self.over, self.error = True, Cancelled("everybody left")
        with self._reading:
            self._exit()
        return True

    def read(self, at: int) -> Chunk | None:
        """Chunk number `at`, waiting for it; None after the last one. Raises what the generation raised."""
        while True:
            if at < len(self.chunks):
                return self.chunks[at]
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            if self._reading.acquire(blocking=False):
                try:
                    if at >= len(self.chunks) and not self.over:
                        self._advance()
                finally:
                    self._reading.release()
                    with self._changed:
                        self._changed.notify_all()
            else:
                with self._changed:
                    if at >= len(self.chunks) and not self.over:
                        self._changed.wait(0.05)

    def _advance(self) -> None:
        try:
            if not self._entered:
                self.stream.__enter__()
                self._entered = True
            self.chunks.append(next(self.stream))
            self.times.append(time.perf_counter())
        except StopIteration:
            self._landed(self)
            self.over = True
            self._exit()
        except BaseException as error:
            self.error, self.over = error, True
            self._exit()

    def _exit(self) -> None:
        if self._entered:
            self._entered = False
            self.stream.__exit__(None, None, None)


class Flights:
    """Those that are under way, by the key of their question."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}
        self._lock = threading.Lock()

    def join(self, key: bytes, make: Callable[[], Flight]) -> tuple[Flight, bool]:
        """The flight of a key, boarded; and whether it has just been made."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None and flight.board():
                return flight, False
            flight = self._flights[key] = make()
            flight.board()
            return flight, True

    def leave(self, key: bytes, flight: Flight) -> None:
        """Leave; a flight without passengers, or that is over, takes nobody on any more."""
        with self._lock:
            if flight.over and self._flights.get(key) is flight:
                del self._flights[key]
        if flight.leave():
            with self._lock:
                if self._flights.get(key) is flight:
                    del self._flights[key]


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


_SHARED = Cached("shared")


class _Passage:
    """Of whoever took off (`first`), the figures are the stream's own; others are marked as shared."""

    def __init__(self, flight: Flight | AsyncFlight, request_id: str, *, first: bool) -> None:
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._shared, self._request_id, self._first = flight, request_id, first
        self._began = time.perf_counter()
        self._times: list[float] = []
        self._cancelled = False

    @property
    def stats(self) -> Stats:
        """The figures up to now; tokens are those of the generation."""
        stats = self._shared.stream.stats
        if self._first:
            return stats
        times = self._times
        return replace(
            stats,
            ttft_ms=(times[0] - self._began) * 1e3 if times else None,
            itl_ms=tuple((later - earlier) * 1e3 for earlier, later in pairwise(times)),
            total_ms=(times[-1] - self._began) * 1e3 if self.finish_reason else None,
            chunks=len(times),
            cached=_SHARED,
        )

    def answer(self) -> Answer:
        """The whole answer, once all chunks have been read."""
        if self.finish_reason is None:
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        return replace(self._shared.stream.answer(), stats=self.stats, request_id=self._request_id)

    def _told(self, chunk: Chunk) -> Chunk:
        if self._cancelled:
            raise Cancelled("the answer was cancelled")
        self._times.append(time.perf_counter())
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason
        return chunk if self._first else replace(chunk, cached=_SHARED)

    def cancel(self) -> None:
        """Leave the others to it; alone, the generation ends on the server too."""
        self._cancelled = True
        if self._shared.passengers == 1:
            self._shared.stream.cancel()


class Passage(_Passage):
    """For threads."""

    def __init__(self, flight: Flight, request_id: str, *, first: bool) -> None:
        super().__init__(flight, request_id, first=first)
        self._flight = flight

    def __iter__(self) -> Iterator[Chunk]:
        at = 0
        while (chunk := self._flight.read(at)) is not None:
            at += 1
            yield self._told(chunk)


class AsyncPassage(_Passage):
    """For asyncio."""

    def __init__(self, flight: AsyncFlight, request_id: str, *, first: bool) -> None:
        super().__init__(flight, request_id, first=first)
        self._flight = flight

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        at = 0
        while (chunk := await self._flight.read(at)) is not None:
            at += 1
            yield self._told(chunk)
