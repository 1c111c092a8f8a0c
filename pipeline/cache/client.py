"""A client with a response cache in front: the same `stream` and `generate`, answered from the cache where it can be.

    with CachingClient(AsyncClient(url, template=template), cache, Origin(deployment.digest)) as client:
        with client.stream("Where is my parcel?", max_tokens=64, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.stats.cached)

`AsyncCachingClient` is the same for asyncio. Its lookup runs on the event loop where it takes microseconds, and in a
thread where it may wait for a server or an embedding.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar, Unpack

from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.streams import Replay, SharedStream, SingleFlight, Subscriber, stored_chunks
from pipeline.client import (
    Answer,
    AsyncClient,
    AsyncStream,
    Chunk,
    FinishReason,
    Prompt,
    Refused,
    RequestOptions,
    Sampling,
    Stats,
)
from pipeline.client.tensors import ModelSignature

T = TypeVar("T")
# Time that requests have to notice that their client is closed.
_CLOSE_TIMEOUT_S = 5.0


class CachedRequestOptions(RequestOptions, total=False):
    """Arguments of a caching client's `stream` and `generate` beside the prompt: a client's, and these.

    Attributes:
        cache: False: the answer is neither looked up nor stored.
        ttl_s: time for which the answer may be served again, in seconds; by default the cache's `ttl_s`.
        rendered: the prompt as the chat template renders messages and tools, where that is known already.
        variables: values that the chat template was given for it besides messages and tools.
        unkeyed: parameters that are sent, but are no part of the question, such as a seed that is drawn anew each time.
    """

    cache: bool
    ttl_s: float | None
    rendered: str | None
    variables: Mapping[str, Any] | None
    unkeyed: Sampling | None


class AsyncCachingClient:
    """Answer from the cache, or ask `client` and store its answer. Equal requests at the same time share one stream."""

    def __init__(
        self, client: AsyncClient, cache: ResponseCache, origin: Origin, *, pace: float | None = None
    ) -> None:
        """
        Args:
            client: sends requests that the cache cannot answer; closed with this one.
            cache: closed with this one.
            origin: identifies the deployment, and whose answers these are.
            pace: factor on the time between chunks of a replayed answer: 0 at once, 1 as it once came. By default
                `cache.pace`.
        """
        self.client, self.cache, self.origin = client, cache, origin
        self.pace = cache.pace if pace is None else pace
        self.single_flight = SingleFlight()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client's connection and the cache."""
        await self.client.aclose()
        self.cache.close()

    def stream(self, prompt: Prompt, **request: Unpack[CachedRequestOptions]) -> AsyncCachedStream:
        """Make a stream, to be entered with `async with` and iterated over with `async for`.

        Args:
            prompt: as `AsyncClient.stream` takes it.
            **request: see `CachedRequestOptions`.

        Raises:
            Refused: `ttl_s` is not above 0.
        """
        return AsyncCachedStream(self, prompt, request)

    async def generate(self, prompt: Prompt, **request: Unpack[CachedRequestOptions]) -> Answer:
        """Generate a complete answer, or take it from the cache; arguments and errors are those of `stream`.

        Raises the errors of `Client.generate`, too.
        """
        async with self.stream(prompt, **request) as stream:
            async for _ in stream:
                pass
            return stream.answer()


class _StreamView:
    """A stream that reads another, and shows its answer."""

    @property
    def _source(self) -> Replay | Subscriber | AsyncStream | AsyncCachedStream:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The text so far."""
        return self._source.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None until it has."""
        return self._source.finish_reason

    @property
    def stats(self) -> Stats:
        """Figures so far; `stats.cached` tells where the answer came from."""
        return self._source.stats

    def answer(self) -> Answer:
        """Return the complete answer, once all chunks have been read."""
        return self._source.answer()


class AsyncCachedStream(_StreamView):
    """The chunks of one answer: from the cache, from an equal request that is running, or from the model."""

    def __init__(self, client: AsyncCachingClient, prompt: Prompt, request: CachedRequestOptions) -> None:
        sampling: dict[str, Any] = dict(request)
        self.request_id: str = sampling.pop("request_id", None) or uuid.uuid4().hex
        self._client, self._prompt = client, prompt
        self._tools = sampling.pop("tools", None) or ()
        self._routing = {name: sampling.pop(name, None) for name in ("affinity", "prior")}
        self._rendered: str | None = sampling.pop("rendered", None)
        self._variables = sampling.pop("variables", None) or {}
        self._unkeyed: Mapping[str, Any] = sampling.pop("unkeyed", None) or {}
        self._ttl_s: float | None = sampling.pop("ttl_s", None)
        if self._ttl_s is not None and not self._ttl_s > 0:
            raise Refused(f"ttl_s = {self._ttl_s!r}: must be more than 0; cache=False keeps nothing")
        # A stored answer has no room for top log probs nor for those of its prompt, and is stored as a whole.
        self._cacheable = (
            sampling.pop("cache", True)
            and not sampling.get("top_log_probs")
            and sampling.get("prompt_log_probs") is None
            and self._routing["prior"] is None
        )
        self._sampling = sampling
        self._entered: Replay | Subscriber | AsyncStream | None = None
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

    def cancel(self) -> None:
        """Stop the answer; on the server too, unless others wait for it."""
        self._source.cancel()

    @property
    def _source(self) -> Replay | Subscriber | AsyncStream:
        if self._entered is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._entered

    async def _find(self) -> Replay | Subscriber | AsyncStream:
        client, question = self._client, self._question()
        if question is not None:
            if (replay := await self._replay(question)) is not None:
                return replay
            if client.cache.may_answer(question):
                shared, first = client.single_flight.join(
                    question.key,
                    lambda: SharedStream(self._send(), lambda shared: self._store(question, shared)),
                )
                self._exit.push_async_callback(client.single_flight.leave, question.key, shared)
                return Subscriber(shared, self.request_id, first=first)
        return await self._exit.enter_async_context(self._send())

    def _question(self) -> Question | None:
        """Make the question for the cache; None if the request excludes the cache, or if that fails."""
        if self._cacheable:
            with self._client.cache.contained("question"):
                return make_question(
                    self._client.origin,
                    self._prompt,
                    {**self._client.client.defaults, **self._sampling},
                    tools=self._tools,
                    variables=self._variables,
                )
        return None

    async def _replay(self, question: Question) -> Replay | None:
        cache = self._client.cache
        with cache.contained("lookup"):
            # It asks a server, or embeds the question: too long for an event loop.
            waits = cache.backend.remote or (cache.semantic is not None and question.comparable)
            hit = await asyncio.to_thread(cache.lookup, question) if waits else cache.lookup(question)
            if hit is not None:
                return Replay(hit, self.request_id, self._client.pace)
        return None

    def _send(self) -> AsyncStream:
        sampling = {**self._sampling, **self._unkeyed, **self._routing, "request_id": self.request_id}
        if self._rendered is not None:
            return self._client.client.stream(self._rendered, **sampling)
        return self._client.client.stream(self._prompt, tools=self._tools, **sampling)

    async def _store(self, question: Question, shared: SharedStream) -> None:
        """Store the answer of a stream that is complete. Raises nothing: its subscribers have their answer."""
        cache, stats = self._client.cache, shared.stream.stats

        def store() -> None:
            with cache.contained("store"):
                # Token ids that are no part of the question are not asked for by those whom the cache answers.
                token_ids = not self._unkeyed.get("token_ids")
                cache.store(
                    question,
                    stored_chunks(shared.chunks, shared.began, shared.times, token_ids=token_ids),
                    finish_reason=shared.stream.finish_reason or "unknown",
                    input_tokens=stats.input_tokens,
                    output_tokens=stats.output_tokens,
                    ttl_s=self._ttl_s,
                )

        with cache.contained("store"):
            await asyncio.to_thread(store)


class CachingClient:
    """`AsyncCachingClient` for threads, any number of which may share one: its event loop runs in a thread of its own.

    `client` sends requests that the cache cannot answer; it and the cache are closed with this one.
    """

    def __init__(
        self, client: AsyncClient, cache: ResponseCache, origin: Origin, *, pace: float | None = None
    ) -> None:
        self._caching = AsyncCachingClient(client, cache, origin, pace=pace)
        self.url, self.model_name = client.url, client.model_name
        self.closed = False
        self._guard = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="caching-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client's connection and the cache. Streams that are open raise `Cancelled`."""
        with self._guard:
            if self.closed:
                return
            self.closed = True
            future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        future.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def model(self) -> ModelSignature:
        """See `Client.model`."""
        return self.run(self._caching.client.model())

    def stream(self, prompt: Prompt, **request: Unpack[CachedRequestOptions]) -> CachedStream:
        """Make a stream, to be entered with `with` and iterated over. See `AsyncCachingClient.stream`."""
        return CachedStream(self, self._caching.stream(prompt, **request))

    def generate(self, prompt: Prompt, **request: Unpack[CachedRequestOptions]) -> Answer:
        """Generate a complete answer, or take it from the cache. See `AsyncCachingClient.generate`."""
        return self.run(self._caching.generate(prompt, **request))

    def call_soon(self, work: Callable[[], object]) -> None:
        """Call a function on the loop, without waiting for it."""
        with self._guard:
            if not self.closed:
                self._loop.call_soon_threadsafe(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop. It is cancelled if this thread is interrupted meanwhile."""
        with self._guard:
            if self.closed:
                work.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _close(self) -> None:
        await self._caching.aclose()
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class CachedStream(_StreamView):
    """An `AsyncCachedStream` for threads, made by `CachingClient.stream`. Read by one thread, cancelled from any."""

    def __init__(self, client: CachingClient, stream: AsyncCachedStream) -> None:
        self.request_id = stream.request_id
        self._client, self._stream = client, stream
        # Held by each step, so that one that was interrupted has ended before the next begins.
        self._step = asyncio.Lock()

    def __enter__(self) -> Self:
        try:
            self._run(self._stream.__aenter__)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A client that is closed has ended its streams.
        if not self._client.closed:
            self._run(self._stream.__aexit__)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = self._run(self._next)
        if chunk is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """Stop the answer; on the server too, unless others wait for it."""
        self._client.call_soon(self._stream.cancel)

    @property
    def _source(self) -> AsyncCachedStream:
        return self._stream

    async def _next(self) -> Chunk | None:
        return await anext(self._source, None)

    def _run(self, step: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self._step:
                return await step()

        return self._client.run(run())
