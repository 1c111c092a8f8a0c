"""The blocking client with a response cache in front: the same `stream` and `generate`, answered from it where it can.

with CachingClient(Client(url, template=template), cache, Origin(deployment.digest)) as client:
    with client.stream("Where is my parcel?", max_tokens=64, temperature=0) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(stream.stats.cached)
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any, Self, Unpack

from pipeline.cache.flights import Flight, Flights
from pipeline.cache.key import Origin, Question, ask
from pipeline.cache.passage import Passage
from pipeline.cache.recording import pieces_of
from pipeline.cache.replay import Replay
from pipeline.cache.response_cache import ResponseCache
from pipeline.client import Answer, Chunk, Client, FinishReason, Sampling, Stats, Stream
from pipeline.client.base import Prompt


class CachingClient:
    """Answers from the cache, or asks `client` and keeps the answer. Equal requests that run together share one."""

    def __init__(self, client: Client, cache: ResponseCache, origin: Origin, *, pace: float = 0.0) -> None:
        """`pace`: how slowly a kept answer is replayed; 0 is at once, 1 as it once came."""
        self.client, self.cache, self.origin, self.pace = client, cache, origin, pace
        self.flights = Flights()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the client's connection, and gives up the cache."""
        self.client.close()
        self.cache.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        cache: bool = True,
        **sampling: Unpack[Sampling],
    ) -> CachedStream:
        """An answer, chunk by chunk; with `cache=False` neither looked up nor kept."""
        return CachedStream(self, prompt, sampling, request_id, use_cache=cache)

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        cache: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """A whole answer."""
        with self.stream(prompt, request_id=request_id, cache=cache, **sampling) as stream:
            for _ in stream:
                pass
            return stream.answer()


class CachedStream:
    """The chunks of one answer: from the cache, from an equal request that is running, or from the model."""

    def __init__(
        self, client: CachingClient, prompt: Prompt, sampling: Any, request_id: str | None, *, use_cache: bool
    ) -> None:
        self.request_id = request_id or uuid.uuid4().hex
        self._client, self._prompt, self._use_cache = client, prompt, use_cache
        self._sampling = sampling
        self._entered: Replay | Passage | Stream | None = None
        self._leave: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self._entered = self._source()
        self._chunks = iter(self._entered)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @property
    def text(self) -> str:
        """All text so far."""
        return self._told.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None until it has."""
        return self._told.finish_reason

    @property
    def stats(self) -> Stats:
        """The figures up to now; `stats.cached` tells where the answer came from."""
        return self._told.stats

    def answer(self) -> Answer:
        """The whole answer, once all chunks have been read."""
        return self._told.answer()

    def cancel(self) -> None:
        """Stop the answer; on the server too, unless others wait for it."""
        self._told.cancel()

    @property
    def _told(self) -> Replay | Passage | Stream:
        if self._entered is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._entered

    def _source(self) -> Replay | Passage | Stream:
        client, cache = self._client, self._client.cache
        if self._use_cache:
            question = ask(client.origin, self._prompt, {**client.client.defaults, **self._sampling})
            if (hit := cache.lookup(question)) is not None:
                return Replay(hit, self.request_id, client.pace)
            if cache.may_answer(question):
                flight, first = client.flights.join(question.key, lambda: self._take_off(question))
                self._leave = lambda: client.flights.leave(question.key, flight)
                return Passage(flight, self.request_id, first=first)
        stream = self._ask().__enter__()
        self._leave = lambda: stream.__exit__(None, None, None)
        return stream

    def _ask(self) -> Stream:
        return self._client.client.stream(self._prompt, request_id=self.request_id, **self._sampling)

    def _take_off(self, question: Question) -> Flight:
        cache = self._client.cache

        def landed(flight: Flight) -> None:
            stats, reason = flight.stream.stats, flight.stream.finish_reason
            cache.store(
                question,
                pieces_of(flight.chunks, flight.began, flight.times),
                finish_reason=reason or "unknown",
                input_tokens=stats.input_tokens,
                output_tokens=stats.output_tokens,
            )

        return Flight(self._ask(), landed)
