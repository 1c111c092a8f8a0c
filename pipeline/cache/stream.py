"""What the blocking and the asyncio client with a cache have in common."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pipeline.cache.async_flights import AsyncFlight
from pipeline.cache.flights import Flight
from pipeline.cache.key import Origin, Question, ask
from pipeline.cache.passage import AsyncPassage, Passage
from pipeline.cache.recording import pieces_of
from pipeline.cache.replay import Replay
from pipeline.cache.response_cache import ResponseCache
from pipeline.client import Answer, AsyncStream, FinishReason, Refused, Stats, Stream
from pipeline.client.base import Prompt

_Source = TypeVar("_Source", Replay | Passage | Stream, Replay | AsyncPassage | AsyncStream)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says."""

    prompt: Prompt
    sampling: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    unkeyed: Mapping[str, Any]  # sent, and not a part of the question
    ttl_s: float | None = (
        None  # how long the answer may be served again; None: as the cache judges the question
    )

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise Refused(f"ttl_s = {self.ttl_s!r}: must be more than 0; cache=False keeps nothing")

    @property
    def sent(self) -> dict[str, Any]:
        """All sampling parameters."""
        return {**self.sampling, **self.unkeyed}

    def question(self, origin: Origin, defaults: Mapping[str, Any]) -> Question:
        """As the cache sees it; `defaults` are the client's sampling parameters."""
        return ask(origin, self.prompt, {**defaults, **self.sampling}, tools=self.tools)


class CachedStreamBase(Generic[_Source]):
    """One request, answered from wherever its source is."""

    def __init__(self, asked: Asked, request_id: str | None, *, use_cache: bool) -> None:
        self.request_id = request_id or uuid.uuid4().hex
        self._asked, self._use_cache = asked, use_cache
        self._entered: _Source | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return self._source.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None until it has."""
        return self._source.finish_reason

    @property
    def stats(self) -> Stats:
        """The figures up to now; `stats.cached` tells where the answer came from."""
        return self._source.stats

    def answer(self) -> Answer:
        """The whole answer, once all chunks have been read."""
        return self._source.answer()

    def cancel(self) -> None:
        """Stop the answer; on the server too, unless others wait for it."""
        self._source.cancel()

    @property
    def _source(self) -> _Source:
        if self._entered is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._entered


def keep(
    cache: ResponseCache, question: Question, flight: Flight | AsyncFlight, ttl_s: float | None = None
) -> None:
    """Store the answer of a flight that has landed."""
    stats = flight.stream.stats
    cache.store(
        question,
        pieces_of(flight.chunks, flight.began, flight.times),
        finish_reason=flight.stream.finish_reason or "unknown",
        input_tokens=stats.input_tokens,
        output_tokens=stats.output_tokens,
        ttl_s=ttl_s,
    )
