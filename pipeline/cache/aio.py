"""The asyncio client with a response cache in front; see `pipeline.cache.client`.

    async with AsyncCachingClient(AsyncClient(url, template=template), cache, Origin(deployment.digest)) as client:
        async with client.stream("Where is my parcel?", max_tokens=64, temperature=0) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

A lookup runs on the event loop where it takes microseconds, and in a thread where it may not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Self, Unpack

from pipeline.cache.async_single_flight import AsyncFlight, AsyncFlights
from pipeline.cache.key import Origin, Question
from pipeline.cache.replay import Replay
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.stream import Asked, CachedStreamBase, Request, keep
from pipeline.cache.subscriber import AsyncPassage
from pipeline.client import Answer, AsyncClient, AsyncStream, Chunk, Prompt


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
