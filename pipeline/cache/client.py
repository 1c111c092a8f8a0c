"""The blocking client with a response cache in front: the same `stream` and `generate`, answered from it where it can.

with CachingClient(Client(url, template=template), cache, Origin(deployment.digest)) as client:
    with client.stream("Where is my parcel?", max_tokens=64, temperature=0) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(stream.stats.cached)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self, Unpack

from pipeline.cache.key import Origin, Question
from pipeline.cache.replay import Replay
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.single_flight import Flight, Flights
from pipeline.cache.stream import Asked, CachedStreamBase, Request, keep
from pipeline.cache.subscriber import Passage
from pipeline.client import Answer, Chunk, Client, Prompt, Stream


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
