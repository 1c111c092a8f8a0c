"""Streams that answer in place of the client's own: a replay of a stored answer, and a share in a running one.

Single flight makes one generation of all equal requests that run at the same time. The first request starts a stream.
Equal requests that come meanwhile subscribe to it, and get every chunk from the first one on. The generation goes on as
long as one subscriber is left, and ends early when the last one leaves. A task of its own reads the stream: if a
subscriber did, cancelling that subscriber would cancel the gRPC call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from pipeline.cache.entry import StoredChunk
from pipeline.cache.response_cache import Hit
from pipeline.client import Answer, AsyncStream, Cached, Cancelled, Chunk, FinishReason, Stats
from pipeline.client.answer import timing


class Replay:
    """The chunks of a stored answer, each when it is due, with figures of their own."""

    def __init__(self, hit: Hit, request_id: str, pace: float) -> None:
        """
        Args:
            hit: decoded here: a damaged entry raises now, and never between two chunks.
            request_id: id of the request that is answered.
            pace: factor on the delays between chunks; 0 replays at once.
        """
        self._pieces = hit.entry.pieces()
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._hit, self._request_id, self._pace = hit, request_id, pace
        self._began = time.perf_counter()
        self._times: list[float] = []
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        due = self._began
        for index, piece in enumerate(self._pieces):
            due += piece.delay_s * self._pace
            if self._pace and (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            if self._cancelled:
                raise Cancelled("the answer was cancelled")
            last = index == len(self._pieces) - 1
            self.finish_reason = self._hit.entry.finish_reason if last else None
            self._times.append(time.perf_counter())
            self.text += piece.text
            yield Chunk(
                piece.text, index, self.finish_reason, piece.token_ids, piece.log_probs, self._hit.cached
            )

    def cancel(self) -> None:
        """Deliver no more chunks: the next one raises Cancelled."""
        self._cancelled = True

    @property
    def stats(self) -> Stats:
        """Figures of the replay; token counts are those of the answer when it was generated."""
        times, entry = self._times, self._hit.entry
        return Stats(
            **timing(self._began, times, times[-1] if self.finish_reason else None),
            input_tokens=entry.input_tokens,
            output_tokens=entry.output_tokens,
            cached=self._hit.cached,
        )

    def answer(self) -> Answer:
        """Return the complete answer."""
        entry = self._hit.entry
        tokens = [piece.token_ids for piece in self._pieces if piece.token_ids is not None]
        log_probs = [piece.log_probs for piece in self._pieces if piece.log_probs is not None]
        return Answer(
            text=entry.text,
            finish_reason=entry.finish_reason,
            stats=self.stats,
            request_id=self._request_id,
            token_ids=tuple(token for row in tokens for token in row) if tokens else None,
            log_probs=tuple(value for row in log_probs for value in row) or None,
        )


def stored_chunks(
    chunks: Sequence[Chunk], began: float, times: Sequence[float], *, token_ids: bool = True
) -> tuple[StoredChunk, ...]:
    """Make the chunks to store; `began` and `times` (of the request, and of each chunk) are seconds of one clock.

    Without `token_ids`, those of the chunks are left out.
    """
    delays = [later - earlier for earlier, later in pairwise([began, *times])]
    return tuple(
        StoredChunk(chunk.text, chunk.token_ids if token_ids else None, chunk.log_probs, delay)
        for chunk, delay in zip(chunks, delays, strict=True)
    )


_SHARED = Cached("shared")


class SharedStream:
    """One generation and its subscribers, for the tasks of one event loop."""

    def __init__(self, stream: AsyncStream, on_complete: Callable[[SharedStream], Awaitable[None]]) -> None:
        """
        Args:
            stream: not entered yet.
            on_complete: awaited once when the answer is complete; the last subscriber to leave waits for it.
        """
        self.stream = stream
        self.chunks: list[Chunk] = []
        # When each chunk came, by `time.perf_counter()`.
        self.times: list[float] = []
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


class SingleFlight:
    """The shared streams that are running, by the key of their question; for one event loop."""

    def __init__(self) -> None:
        self._running: dict[bytes, SharedStream] = {}

    def join(self, key: bytes, start: Callable[[], SharedStream]) -> tuple[SharedStream, bool]:
        """Subscribe to the stream of a key, and start it if there is none. Returns it, and whether it was started."""
        shared = self._running.get(key)
        first = shared is None or shared.over or not shared.subscribers
        if shared is None or first:
            shared = self._running[key] = start()
        shared.subscribers += 1
        return shared, first

    async def leave(self, key: bytes, shared: SharedStream) -> None:
        """Unsubscribe. A stream without subscribers takes no new ones."""
        if shared.subscribers == 1 and self._running.get(key) is shared:
            del self._running[key]
        await shared.leave()


class Subscriber:
    """The chunks of a shared stream for one request, with figures of its own.

    Those of the first one are the stream's own figures; chunks and figures of the others are marked as shared.
    """

    def __init__(self, shared: SharedStream, request_id: str, *, first: bool) -> None:
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._shared, self._request_id, self._first = shared, request_id, first
        self._began = time.perf_counter()
        self._times: list[float] = []
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        at = 0
        while (chunk := await self._shared.read(at)) is not None:
            at += 1
            if self._cancelled:
                raise Cancelled("the answer was cancelled")
            self._times.append(time.perf_counter())
            self.text += chunk.text
            self.finish_reason = chunk.finish_reason
            yield chunk if self._first else replace(chunk, cached=_SHARED)

    @property
    def stats(self) -> Stats:
        """Figures so far; token counts are those of the generation."""
        stats = self._shared.stream.stats
        if self._first:
            return stats
        times = self._times
        return replace(
            stats,
            **timing(self._began, times, times[-1] if self.finish_reason else None),
            cached=_SHARED,
        )

    def answer(self) -> Answer:
        """Return the complete answer. Raises RuntimeError before all chunks have been read."""
        if self.finish_reason is None:
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        return replace(self._shared.stream.answer(), stats=self.stats, request_id=self._request_id)

    def cancel(self) -> None:
        """Stop reading. The generation ends on the server too if there is no other subscriber."""
        self._cancelled = True
        if self._shared.subscribers == 1:
            self._shared.stream.cancel()
