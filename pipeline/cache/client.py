"""A client with a response cache in front: the same `stream` and `generate`, answered from the cache where it can be.

    with CachingClient(Client(url, template=template), cache, Origin(deployment.digest)) as client:
        with client.stream("Where is my parcel?", max_tokens=64, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.stats.cached)

`AsyncCachingClient` is the same for asyncio. Its lookup runs on the event loop where it takes microseconds, and in a
thread where it may wait for a server or an embedding.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, Unpack

from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.replay import Replay, stored_chunks
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.single_flight import (
    AsyncSharedStream,
    AsyncSingleFlight,
    AsyncSubscriber,
    SharedStream,
    SingleFlight,
    Subscriber,
)
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

_Source = TypeVar("_Source", Replay | Subscriber | Stream, Replay | AsyncSubscriber | AsyncStream)


class RequestOptions(Sampling, total=False):
    """What a request may say besides its prompt: sampling parameters, and what the cache may do with it."""

    request_id: str | None
    tools: Sequence[Mapping[str, Any]]
    # The prompt as the chat template renders messages and tools, where that is known already.
    rendered: str | None
    # What the chat template was given for it besides messages and tools.
    variables: Mapping[str, Any]
    # False: neither looked up nor stored.
    cache: bool
    # How long the answer may be served again; by default the cache's `ttl_s`.
    ttl_s: float | None
    # Requests with the same one go to the same server; see `AsyncClient.stream`.
    affinity: str | None
    # Parameters that are sent, but are no part of the question, such as a seed that is drawn anew each time.
    unkeyed: Sampling | None


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request, taken apart into its prompt, its sampling parameters, and what is for the cache."""

    prompt: Prompt
    sampling: Mapping[str, Any]
    request_id: str | None
    tools: Sequence[Mapping[str, Any]]
    rendered: str | None
    variables: Mapping[str, Any]
    cache: bool
    ttl_s: float | None
    affinity: str | None
    unkeyed: Mapping[str, Any]

    @classmethod
    def of(cls, prompt: Prompt, request: RequestOptions) -> Self:
        """Take apart a request. Raises Refused if its `ttl_s` is not above 0."""
        sampling: dict[str, Any] = dict(request)
        return cls(
            prompt,
            request_id=sampling.pop("request_id", None),
            tools=sampling.pop("tools", ()),
            rendered=sampling.pop("rendered", None),
            variables=sampling.pop("variables", None) or {},
            # A stored answer has no room for top log-probs, nor for those of its prompt.
            cache=sampling.pop("cache", True)
            and not sampling.get("top_log_probs")
            and sampling.get("prompt_log_probs") is None,
            ttl_s=sampling.pop("ttl_s", None),
            affinity=sampling.pop("affinity", None),
            unkeyed=sampling.pop("unkeyed", None) or {},
            sampling=sampling,
        )

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise Refused(f"ttl_s = {self.ttl_s!r}: must be more than 0; cache=False keeps nothing")

    @property
    def sent(self) -> tuple[Prompt, dict[str, Any]]:
        """What the client streams: a prompt, tools if it is not rendered, and all sampling parameters."""
        sampling = {**self.sampling, **self.unkeyed, "affinity": self.affinity}
        if self.rendered is not None:
            return self.rendered, sampling
        return self.prompt, {"tools": self.tools, **sampling}

    def question(self, origin: Origin, defaults: Mapping[str, Any]) -> Question:
        """Make the question that the cache is asked; `defaults` are the client's own sampling parameters."""
        sampling = {**defaults, **self.sampling}
        return make_question(origin, self.prompt, sampling, tools=self.tools, variables=self.variables)


class CachedStreamBase(Generic[_Source]):
    """What the streams of both clients have in common: one request, and the source that answers it."""

    def __init__(self, request: CachedRequest) -> None:
        self.request_id = request.request_id or uuid.uuid4().hex
        self._request = request
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
        """Return the complete answer, once all chunks have been read."""
        return self._source.answer()

    def cancel(self) -> None:
        """Stop the answer; on the server too, unless others wait for it."""
        self._source.cancel()

    def _question(self, cache: ResponseCache, origin: Origin, defaults: Mapping[str, Any]) -> Question | None:
        """Make the question for the cache; None if the request excludes the cache, or if that fails."""
        if self._request.cache:
            with cache.contained("question"):
                return self._request.question(origin, defaults)
        return None

    @property
    def _source(self) -> _Source:
        if self._entered is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._entered


def store_answer(
    cache: ResponseCache,
    question: Question,
    shared: SharedStream | AsyncSharedStream,
    request: CachedRequest,
) -> None:
    """Store the answer of a stream that is complete. Raises nothing: its subscribers have their answer."""
    with cache.contained("store"):
        stats = shared.stream.stats
        cache.store(
            question,
            # Token ids that are no part of the question are not asked for by those whom the cache answers.
            stored_chunks(
                shared.chunks,
                shared.began,
                shared.times,
                token_ids=not request.unkeyed.get("token_ids"),
            ),
            finish_reason=shared.stream.finish_reason or "unknown",
            input_tokens=stats.input_tokens,
            output_tokens=stats.output_tokens,
            ttl_s=request.ttl_s,
        )


class CachingClient:
    """Answer from the cache, or ask `client` and store its answer. Equal requests at the same time share one stream."""

    def __init__(
        self, client: Client, cache: ResponseCache, origin: Origin, *, pace: float | None = None
    ) -> None:
        """
        Args:
            client: sends requests that the cache cannot answer; closed with this one.
            cache: closed with this one.
            origin: identifies the deployment, and whose answers these are.
            pace: how slowly an answer is replayed: 0 at once, 1 as it once came. By default `cache.pace`.
        """
        self.client, self.cache, self.origin = client, cache, origin
        self.pace = cache.pace if pace is None else pace
        self.single_flight = SingleFlight()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client's connection and the cache."""
        self.client.close()
        self.cache.close()

    def stream(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> CachedStream:
        """Stream an answer.

        Args:
            prompt: text, or chat messages.
            **request: see `RequestOptions`.

        Returns:
            A stream, to be entered with `with` and iterated over.

        Raises:
            Refused: `ttl_s` is not above 0.
        """
        return CachedStream(self, CachedRequest.of(prompt, request))

    def generate(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> Answer:
        """Generate a complete answer; arguments as `stream` takes them.

        It raises the errors of `Client.generate`, too.

        Args:
            prompt: text, or chat messages.
            **request: see `RequestOptions`.

        Returns:
            The answer, from the cache or from the model.

        Raises:
            Refused: `ttl_s` is not above 0.
        """
        with self.stream(prompt, **request) as stream:
            for _ in stream:
                pass
            return stream.answer()


class CachedStream(CachedStreamBase[Replay | Subscriber | Stream]):
    """The chunks of one answer: from the cache, from an equal request that is running, or from the model."""

    def __init__(self, client: CachingClient, request: CachedRequest) -> None:
        super().__init__(request)
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

    def _find(self) -> Replay | Subscriber | Stream:
        client, cache = self._client, self._client.cache
        question = self._question(cache, client.origin, client.client.defaults)
        if question is not None:
            if (replay := self._replay(question)) is not None:
                return replay
            if cache.may_answer(question):
                shared, first = client.single_flight.join(
                    question.key,
                    lambda: SharedStream(
                        self._send(), lambda shared: store_answer(cache, question, shared, self._request)
                    ),
                )
                self._exit.callback(client.single_flight.leave, question.key, shared)
                return Subscriber(shared, self.request_id, first=first)
        return self._exit.enter_context(self._send())

    def _replay(self, question: Question) -> Replay | None:
        cache = self._client.cache
        with cache.contained("lookup"):
            if (hit := cache.lookup(question)) is not None:
                return Replay(hit, self.request_id, self._client.pace)
        return None

    def _send(self) -> Stream:
        prompt, more = self._request.sent
        return self._client.client.stream(prompt, request_id=self.request_id, **more)


class AsyncCachingClient:
    """`CachingClient` for asyncio."""

    def __init__(
        self, client: AsyncClient, cache: ResponseCache, origin: Origin, *, pace: float | None = None
    ) -> None:
        """
        Args:
            client: sends requests that the cache cannot answer; closed with this one.
            cache: closed with this one.
            origin: identifies the deployment, and whose answers these are.
            pace: how slowly an answer is replayed: 0 at once, 1 as it once came. By default `cache.pace`.
        """
        self.client, self.cache, self.origin = client, cache, origin
        self.pace = cache.pace if pace is None else pace
        self.single_flight = AsyncSingleFlight()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client's connection and the cache."""
        await self.client.aclose()
        self.cache.close()

    def stream(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> AsyncCachedStream:
        """Stream an answer; see `CachingClient.stream`. The stream is entered with `async with`.

        Args:
            prompt: text, or chat messages.
            **request: see `RequestOptions`.

        Returns:
            A stream, to be entered with `async with` and iterated over with `async for`.

        Raises:
            Refused: `ttl_s` is not above 0.
        """
        return AsyncCachedStream(self, CachedRequest.of(prompt, request))

    async def generate(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> Answer:
        """Generate a complete answer; arguments as `stream` takes them.

        It raises the errors of `AsyncClient.generate`, too.

        Args:
            prompt: text, or chat messages.
            **request: see `RequestOptions`.

        Returns:
            The answer, from the cache or from the model.

        Raises:
            Refused: `ttl_s` is not above 0.
        """
        async with self.stream(prompt, **request) as stream:
            async for _ in stream:
                pass
            return stream.answer()


class AsyncCachedStream(CachedStreamBase[Replay | AsyncSubscriber | AsyncStream]):
    """The chunks of one answer: from the cache, from an equal request that is running, or from the model."""

    def __init__(self, client: AsyncCachingClient, request: CachedRequest) -> None:
        super().__init__(request)
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

    async def _find(self) -> Replay | AsyncSubscriber | AsyncStream:
        client, cache = self._client, self._client.cache
        question = self._question(cache, client.origin, client.client.defaults)
        if question is not None:
            if (replay := await self._replay(question)) is not None:
                return replay
            if cache.may_answer(question):
                shared, first = client.single_flight.join(
                    question.key,
                    lambda: AsyncSharedStream(self._send(), lambda shared: self._store(question, shared)),
                )
                self._exit.push_async_callback(client.single_flight.leave, question.key, shared)
                return AsyncSubscriber(shared, self.request_id, first=first)
        return await self._exit.enter_async_context(self._send())

    def _send(self) -> AsyncStream:
        prompt, more = self._request.sent
        return self._client.client.stream(prompt, request_id=self.request_id, **more)

    async def _replay(self, question: Question) -> Replay | None:
        cache = self._client.cache
        with cache.contained("lookup"):
            waits = cache.may_wait(question)
            hit = await asyncio.to_thread(cache.lookup, question) if waits else cache.lookup(question)
            if hit is not None:
                return Replay(hit, self.request_id, self._client.pace)
        return None

    async def _store(self, question: Question, shared: AsyncSharedStream) -> None:
        cache = self._client.cache
        with cache.contained("store"):
            await asyncio.to_thread(store_answer, cache, question, shared, self._request)
