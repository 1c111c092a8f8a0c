"""What the blocking and the asyncio client with a cache have in common."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, Unpack

from pipeline.cache.key import Origin, Question, ask
from pipeline.cache.replay import Replay, pieces_of
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.single_flight import AsyncFlight, AsyncFlights, AsyncPassage, Flight, Flights, Passage
from pipeline.client import (
    Answer,
    AsyncClient,
    AsyncStream,
    Chunk,
    Client,
    FinishReason,
    Prompt,
    Refused,
    Sampling,
    Stats,
    Stream,
)

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


class CachingClient:
    """Answers from the cache, or asks `client` and keeps the answer. Equal requests that run together share one."""

    def __init__(
        self, client: Client, cache: ResponseCache, origin: Origin, *, pace: float | None = None
    ) -> None:
        """`pace`: how slowly a kept answer is replayed, 0 at once, 1 as it once came; by default as the cache says."""
        self.client, self.cache, self.origin = client, cache, origin
        self.pace = cache.pace if pace is None else pace
        self.flights = Flights()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the client's connection, and gives up the cache."""
        self.client.close()
        self.cache.close()

    def stream(self, prompt: Prompt, **request: Unpack[Request]) -> CachedStream:
        """An answer, chunk by chunk; `Request` tells what else may be asked for."""
        return CachedStream(self, Asked.of(prompt, request))

    def generate(self, prompt: Prompt, **request: Unpack[Request]) -> Answer:
        """A whole answer."""
        with self.stream(prompt, **request) as stream:
            for _ in stream:
                pass
            return stream.answer()


class CachedStream(CachedStreamBase[Replay | Passage | Stream]):
    """The chunks of one answer: from the cache, from an equal request that is running, or from the model."""

    def __init__(self, client: CachingClient, asked: Asked) -> None:
        super().__init__(asked)
        self._client = client
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self._entered = self._find()
        self._chunks = iter(self._entered)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def _find(self) -> Replay | Passage | Stream:
        client, cache, ttl_s = self._client, self._client.cache, self._asked.ttl_s
        question = self._question(cache, client.origin, client.client.defaults)
        if question is not None:
            if (replay := self._replay(question)) is not None:
                return replay
            if cache.may_answer(question):
                flight, first = client.flights.join(
                    question.key,
                    lambda: Flight(self._ask(), lambda flight: keep(cache, question, flight, ttl_s)),
                )
                self._exit.callback(client.flights.leave, question.key, flight)
                return Passage(flight, self.request_id, first=first)
        return self._exit.enter_context(self._ask())

    def _replay(self, question: Question) -> Replay | None:
        cache = self._client.cache
        with cache.contained("lookup"):
            if (hit := cache.lookup(question)) is not None:
                return Replay(hit, self.request_id, self._client.pace)
        return None

    def _ask(self) -> Stream:
        prompt, more = self._asked.sent
        return self._client.client.stream(prompt, request_id=self.request_id, **more)


class AsyncCachingClient:
    """Answers from the cache, or asks `client` and keeps the answer. Equal requests that run together share one."""

    def __init__(
        self, client: AsyncClient, cache: ResponseCache, origin: Origin, *, pace: float | None = None
    ) -> None:
        """`pace`: how slowly a kept answer is replayed, 0 at once, 1 as it once came; by default as the cache says."""
        self.client, self.cache, self.origin = client, cache, origin
        self.pace = cache.pace if pace is None else pace
        self.flights = AsyncFlights()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the client's connection, and gives up the cache."""
        await self.client.aclose()
        self.cache.close()

    def stream(self, prompt: Prompt, **request: Unpack[Request]) -> AsyncCachedStream:
        """An answer, chunk by chunk; `Request` tells what else may be asked for."""
        return AsyncCachedStream(self, Asked.of(prompt, request))

    async def generate(self, prompt: Prompt, **request: Unpack[Request]) -> Answer:
        """A whole answer."""
        async with self.stream(prompt, **request) as stream:
            async for _ in stream:
                pass
            return stream.answer()


class AsyncCachedStream(CachedStreamBase[Replay | AsyncPassage | AsyncStream]):
    """The chunks of one answer: from the cache, from an equal request that is running, or from the model."""

    def __init__(self, client: AsyncCachingClient, asked: Asked) -> None:
        super().__init__(asked)
        self._client = client
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._entered = await self._find()
        self._chunks = aiter(self._entered)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def _find(self) -> Replay | AsyncPassage | AsyncStream:
        client, cache = self._client, self._client.cache
        question = self._question(cache, client.origin, client.client.defaults)
        if question is not None:
            if (replay := await self._replay(question)) is not None:
                return replay
            if cache.may_answer(question):
                flight, first = client.flights.join(
                    question.key,
                    lambda: AsyncFlight(self._ask(), lambda flight: self._keep(question, flight)),
                )
                self._exit.push_async_callback(client.flights.leave, question.key, flight)
                return AsyncPassage(flight, self.request_id, first=first)
        return await self._exit.enter_async_context(self._ask())

    def _ask(self) -> AsyncStream:
        prompt, more = self._asked.sent
        return self._client.client.stream(prompt, request_id=self.request_id, **more)

    async def _replay(self, question: Question) -> Replay | None:
        cache = self._client.cache
        with cache.contained("lookup"):
            waits = cache.may_wait(question)
            hit = await asyncio.to_thread(cache.lookup, question) if waits else cache.lookup(question)
            if hit is not None:
                return Replay(hit, self.request_id, self._client.pace)
        return None

    async def _keep(self, question: Question, flight: AsyncFlight) -> None:
        cache = self._client.cache
        with cache.contained("store"):
            await asyncio.to_thread(keep, cache, question, flight, self._asked.ttl_s)
