"""One passenger's view of a flight: all its chunks from the first one on, with figures of their own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import pairwise

from pipeline.cache.async_single_flight import AsyncFlight
from pipeline.cache.single_flight import Flight
from pipeline.client import Answer, Cached, Cancelled, Chunk, FinishReason, Stats

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
