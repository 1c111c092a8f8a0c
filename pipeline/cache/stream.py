"""What the blocking and the asyncio client with a cache have in common."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from pipeline.cache.async_single_flight import AsyncFlight
from pipeline.cache.key import Origin, Question, ask
from pipeline.cache.recording import pieces_of
from pipeline.cache.replay import Replay
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.single_flight import Flight
from pipeline.cache.subscriber import AsyncPassage, Passage
from pipeline.client import Answer, AsyncStream, FinishReason, Prompt, Refused, Sampling, Stats, Stream

_Source = TypeVar("_Source", Replay | Passage | Stream, Replay | AsyncPassage | AsyncStream)


class Request(Sampling, total=False):
    """What a request may say besides its prompt: how to answer, and what the cache may do with it."""

    request_id: str | None
    tools: Sequence[Mapping[str, Any]]
    rendered: str | None  # what the chat template makes of messages and tools, where that is known
    cache: bool  # False: neither looked up nor kept
    ttl_s: (
        float | None
    )  # how long the answer may be served again; by default as the cache judges the question
    unkeyed: (
        Sampling | None
    )  # sent, and not a part of the question, such as a seed that is drawn anew each time


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, taken apart; see `Request`."""

    prompt: Prompt
    sampling: Mapping[str, Any]
    request_id: str | None
    tools: Sequence[Mapping[str, Any]]
    rendered: str | None
    cache: bool
    ttl_s: float | None
    unkeyed: Mapping[str, Any]

    @classmethod
    def of(cls, prompt: Prompt, request: Request) -> Self:
        """Raises Refused for a time that is not above 0."""
        sampling: dict[str, Any] = dict(request)
        return cls(
            prompt,
            request_id=sampling.pop("request_id", None),
            tools=sampling.pop("tools", ()),
            rendered=sampling.pop("rendered", None),
            # what is kept of an answer has no room for the likeliest tokens
            cache=sampling.pop("cache", True) and not sampling.get("top_log_probs"),
            ttl_s=sampling.pop("ttl_s", None),
            unkeyed=sampling.pop("unkeyed", None) or {},
            sampling=sampling,
        )

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise Refused(f"ttl_s = {self.ttl_s!r}: must be more than 0; cache=False keeps nothing")

    @property
    def sent(self) -> tuple[Prompt, dict[str, Any]]:
        """What the client streams: a prompt, tools if it is not rendered, and all sampling parameters."""
        sampling = {**self.sampling, **self.unkeyed}
        if self.rendered is not None:
            return self.rendered, sampling
        return self.prompt, {"tools": self.tools, **sampling}

    def question(self, origin: Origin, defaults: Mapping[str, Any]) -> Question:
        """As the cache sees it; `defaults` are the client's sampling parameters."""
        return ask(origin, self.prompt, {**defaults, **self.sampling}, tools=self.tools)


class CachedStreamBase(Generic[_Source]):
    """One request, answered from wherever its source is."""

    def __init__(self, asked: Asked) -> None:
        self.request_id = asked.request_id or uuid.uuid4().hex
        self._asked = asked
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

    def _question(self, cache: ResponseCache, origin: Origin, defaults: Mapping[str, Any]) -> Question | None:
        """As the cache sees the request; None if the cache is to have no part in it, or cannot."""
        if self._asked.cache:
            with cache.contained("question"):
                return self._asked.question(origin, defaults)
        return None

    @property
    def _source(self) -> _Source:
        if self._entered is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._entered


def keep(
    cache: ResponseCache, question: Question, flight: Flight | AsyncFlight, ttl_s: float | None = None
) -> None:
    """Store the answer of a flight that has landed. Raises nothing: its passengers have their answer."""
    with cache.contained("store"):
        stats = flight.stream.stats
        cache.store(
            question,
            pieces_of(flight.chunks, flight.began, flight.times),
            finish_reason=flight.stream.finish_reason or "unknown",
            input_tokens=stats.input_tokens,
            output_tokens=stats.output_tokens,
            ttl_s=ttl_s,
        )
