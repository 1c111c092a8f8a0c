"""Replay of a stored answer as the chunks in which it came, with figures of its own; and the chunks that are stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise

from pipeline.cache.entry import StoredChunk
from pipeline.cache.response_cache import Hit
from pipeline.client import Answer, Cached, Cancelled, Chunk, FinishReason, Stats


class Replay:
    """The chunks of a hit, and which of them have been delivered."""

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
        self._chunks = replayed_chunks(self._pieces, hit.entry.finish_reason, hit.cached)
        self._began = time.perf_counter()
        self._due = self._began
        self._times: list[float] = []
        self._cancelled = False

    def next(self) -> tuple[float, Chunk] | None:
        """Return the seconds to wait and the chunk to deliver then; None at the end."""
        if self._cancelled:
            raise Cancelled("the answer was cancelled")
        following = next(self._chunks, None)
        if following is None:
            return None
        delay, chunk = following
        self._due += delay * self._pace
        return max(0.0, self._due - time.perf_counter()) if self._pace else 0.0, chunk

    def deliver(self, chunk: Chunk) -> Chunk:
        """Count a chunk that goes out now."""
        self._times.append(time.perf_counter())
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason
        return chunk

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks, each when it is due; for threads."""
        while (following := self.next()) is not None:
            wait, chunk = following
            if wait > 0:
                time.sleep(wait)
            yield self.deliver(chunk)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield the chunks, each when it is due; for asyncio."""
        while (following := self.next()) is not None:
            wait, chunk = following
            if wait > 0:
                await asyncio.sleep(wait)
            yield self.deliver(chunk)

    def cancel(self) -> None:
        """Deliver no more chunks: the next one raises Cancelled."""
        self._cancelled = True

    @property
    def stats(self) -> Stats:
        """Figures of the replay; token counts are those of the answer when it was generated."""
        times, entry = self._times, self._hit.entry
        return Stats(
            ttft_ms=(times[0] - self._began) * 1e3 if times else None,
            itl_ms=tuple((b - a) * 1e3 for a, b in pairwise(times)),
            total_ms=(times[-1] - self._began) * 1e3 if self.finish_reason else None,
            chunks=len(times),
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


def replayed_chunks(
    pieces: Sequence[StoredChunk], finish_reason: FinishReason, cached: Cached
) -> Iterator[tuple[float, Chunk]]:
    """Yield the chunks again, each with the seconds that it came after the one before it."""
    for index, piece in enumerate(pieces):
        reason = finish_reason if index == len(pieces) - 1 else None
        yield piece.delay_s, Chunk(piece.text, index, reason, piece.token_ids, piece.log_probs, cached)
