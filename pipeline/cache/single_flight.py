"""Single flight: one generation for all equal requests that run at the same time.

The first request starts a stream. Who asks the same meanwhile subscribes to it, and gets every chunk from the first one
on. The generation goes on as long as one subscriber is left, and ends early when the last one leaves.

There is one set of classes for threads and one for asyncio. They differ in who reads: among threads, the subscriber who
needs the next chunk reads it for all; in asyncio a task of its own does, because cancelling whoever reads a gRPC call
cancels the call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from pipeline.client import Answer, AsyncStream, Cached, Cancelled, Chunk, FinishReason, Stats, Stream

_SHARED = Cached("shared")


class SharedStream:
    """One generation and its subscribers, for threads."""

    def __init__(self, stream: Stream, on_complete: Callable[[SharedStream], None]) -> None:
        """
        Args:
            stream: not entered yet; the first read enters it.
            on_complete: called once when the answer is complete, before any subscriber sees its end.
        """
        self.stream = stream
        self.chunks: list[Chunk] = []
        self.times: list[float] = []  # of arrival, on the clock of `perf_counter`
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        self.over = False
        self._on_complete = on_complete
        self._subscribers = 0
        self._entered = False
        self._reading = threading.Lock()  # held by the subscriber who reads for all
        self._changed = threading.Condition()

    @property
    def subscribers(self) -> int:
        """How many wait for it."""
        return self._subscribers

    def subscribe(self) -> bool:
        """Count one more subscriber; False if the generation has failed, or all others have left."""
        with self._changed:
            if self.over and self.error is not None:
                return False
            self._subscribers += 1
            return True

    def leave(self) -> bool:
        """Count one subscriber less. After the last one (True) the generation ends, on the server too."""
        with self._changed:
            self._subscribers -= 1
            if self._subscribers:
                return False
            if not self.over:
                self.over, self.error = True, Cancelled("everybody left")
        with self._reading:
            self._exit()
        return True

    def read(self, at: int) -> Chunk | None:
        """Return chunk number `at`, waiting for it; None after the last one. Raises what the generation raised."""
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
            self._on_complete(self)
            self.over = True
            self._exit()
        except BaseException as error:
            self.error, self.over = error, True
            self._exit()

    def _exit(self) -> None:
        if self._entered:
            self._entered = False
            self.stream.__exit__(None, None, None)


class SingleFlight:
    """The shared streams that are running, by the key of their question; for threads."""

    def __init__(self) -> None:
        self._running: dict[bytes, SharedStream] = {}
        self._lock = threading.Lock()

    def join(self, key: bytes, start: Callable[[], SharedStream]) -> tuple[SharedStream, bool]:
        """Subscribe to the stream of a key, and start it if there is none. Returns it, and whether it was started."""
        with self._lock:
            shared = self._running.get(key)
            if shared is not None and shared.subscribe():
                return shared, False
            shared = self._running[key] = start()
            shared.subscribe()
            return shared, True

    def leave(self, key: bytes, shared: SharedStream) -> None:
        """Unsubscribe. A stream that is over, or has no subscribers left, takes no new ones."""
        with self._lock:
            if shared.over and self._running.get(key) is shared:
                del self._running[key]
        if shared.leave():
            with self._lock:
                if self._running.get(key) is shared:
                    del self._running[key]


class AsyncSharedStream:
    """One generation and its subscribers, for the tasks of one event loop."""

    def __init__(
        self, stream: AsyncStream, on_complete: Callable[[AsyncSharedStream], Awaitable[None]]
    ) -> None:
        """
        Args:
            stream: not entered yet.
            on_complete: awaited once when the answer is complete; the last subscriber to leave waits for it.
        """
        self.stream = stream
        self.chunks: list[Chunk] = []
        self.times: list[float] = []  # of arrival, on the clock of `perf_counter`
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        self.over = False
        self.subscribers = 0
        self._on_complete = on_complete
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def leave(self) -> None:
        """Count one subscriber less. After the last one the generation ends, on the server too."""
        self.subscribers -= 1
        if self.subscribers:
            return
        if not self.over:
            self._task.cancel()
        await asyncio.wait([self._task])

    async def read(self, at: int) -> Chunk | None:
        """Return chunk number `at`, waiting for it; None after the last one. Raises what the generation raised."""
        while at >= len(self.chunks):
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            await self._changed.wait()
        return self.chunks[at]

    async def _run(self) -> None:
        try:
            async with self.stream as stream:
                async for chunk in stream:
                    self.chunks.append(chunk)
                    self.times.append(time.perf_counter())
                    self._wake()
            self.over = True
            self._wake()
            await self._on_complete(self)
        except BaseException as error:
            self.error = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.over = True
            self._wake()

    def _wake(self) -> None:
        """Wake all who wait; whoever waits from now on waits for the next change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class AsyncSingleFlight:
    """The shared streams that are running, by the key of their question; for one event loop."""

    def __init__(self) -> None:
        self._running: dict[bytes, AsyncSharedStream] = {}

    def join(self, key: bytes, start: Callable[[], AsyncSharedStream]) -> tuple[AsyncSharedStream, bool]:
        """Subscribe to the stream of a key, and start it if there is none. Returns it, and whether it was started."""
        shared = self._running.get(key)
        first = shared is None or shared.over or not shared.subscribers
        if shared is None or first:
            shared = self._running[key] = start()
        shared.subscribers += 1
        return shared, first

    async def leave(self, key: bytes, shared: AsyncSharedStream) -> None:
        """Unsubscribe. A stream without subscribers takes no new ones."""
        if shared.subscribers == 1 and self._running.get(key) is shared:
            del self._running[key]
        await shared.leave()


class _SubscriberBase:
    """What one subscriber has received, with figures of its own.

    Those of the first one are the stream's own figures; chunks and figures of the others are marked as shared.
    """

    def __init__(self, shared: SharedStream | AsyncSharedStream, request_id: str, *, first: bool) -> None:
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._shared, self._request_id, self._first = shared, request_id, first
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
        """The complete answer. Raises RuntimeError before all chunks have been read."""
        if self.finish_reason is None:
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        return replace(self._shared.stream.answer(), stats=self.stats, request_id=self._request_id)

    def cancel(self) -> None:
        """Stop reading. The generation ends on the server too if there is no other subscriber."""
        self._cancelled = True
        if self._shared.subscribers == 1:
            self._shared.stream.cancel()

    def _receive(self, chunk: Chunk) -> Chunk:
        if self._cancelled:
            raise Cancelled("the answer was cancelled")
        self._times.append(time.perf_counter())
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason
        return chunk if self._first else replace(chunk, cached=_SHARED)


class Subscriber(_SubscriberBase):
    """A subscriber that is read by a thread."""

    def __init__(self, shared: SharedStream, request_id: str, *, first: bool) -> None:
        super().__init__(shared, request_id, first=first)
        self._stream = shared

    def __iter__(self) -> Iterator[Chunk]:
        at = 0
        while (chunk := self._stream.read(at)) is not None:
            at += 1
            yield self._receive(chunk)


class AsyncSubscriber(_SubscriberBase):
    """A subscriber that is read by a task."""

    def __init__(self, shared: AsyncSharedStream, request_id: str, *, first: bool) -> None:
        super().__init__(shared, request_id, first=first)
        self._stream = shared

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        at = 0
        while (chunk := await self._stream.read(at)) is not None:
            at += 1
            yield self._receive(chunk)
