"""The asyncio client, on `grpc.aio`: the same requests, chunks, figures and errors as the blocking one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.aio_reads import MessageReads
from pipeline.client.answer import Answer, Chunk
from pipeline.client.base import CLOSE_TIMEOUT_S, ClientBase, StreamBase
from pipeline.client.discovery import Servers
from pipeline.client.endpoints import Endpoint, EndpointPool
from pipeline.client.errors import Cancelled, ClientError, ConnectFailed, error_from_status
from pipeline.client.prompt import Prompt
from pipeline.client.sampling import RequestOptions
from pipeline.client.tensors import ModelSignature, read_signature


class AsyncClient(ClientBase["AsyncStream"]):
    """Asyncio client of a language model on Triton. It belongs to the event loop that uses it first.

    Takes the same arguments as `Client`; any number of tasks may share one, over one connection per server.

    >>> async with AsyncClient("localhost:8001") as client:                    # doctest: +SKIP
    ...     async with client.stream("Once upon a time", max_tokens=64) as stream:
    ...         async for chunk in stream:
    ...             print(chunk.text, end="", flush=True)
    """

    def _setup(self) -> None:
        self._stream_class = AsyncStream
        self._model_lock = asyncio.Lock()
        self._open_pool: EndpointPool | None = None
        # Set when DNS has answered for the first time.
        self._first_lookup = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        # Inside of their block.
        self._streams: set[AsyncStream] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Streams that are open raise `Cancelled`."""
        self._closed = True
        self.stop_discovery()
        if self._open_pool is not None:
            for stream in tuple(self._streams):
                stream._abort(Cancelled("the client is closed"))
            for endpoint in self._open_pool.every:
                await endpoint.channel.close()
        if self._closing:
            await asyncio.wait(self._closing)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The servers, with what is known of each. Needs a running event loop."""
        return self._pool.all

    @property
    def requests_sent(self) -> Mapping[str, int]:
        """How many requests each server was sent, by host:port; those that are gone stay."""
        return {} if self._open_pool is None else self._open_pool.requests_sent

    @property
    def fault(self) -> str:
        """Why there are no servers, where there are none. Needs a running event loop."""
        return self._pool.fault

    def watch_servers(self, changed: Callable[[], None]) -> None:
        """React to servers that were added or removed.

        Args:
            changed: called in the event loop, before a request is sent to a server that has come.
        """
        self._pool.changed = changed

    def use_servers(self, urls: Iterable[str]) -> None:
        """Go over to other servers. Requests under way end where they are; then their connections are closed.

        Args:
            urls: host:port of each; none changes nothing.
        """
        if self._closed:
            return
        if servers := tuple(urls):
            self._pool.update(servers, self._connect)
        for endpoint in self._pool.take_drained():
            # An answer that is complete may not have been left yet.
            task = asyncio.ensure_future(endpoint.channel.close(CLOSE_TIMEOUT_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def stop_discovery(self) -> None:
        """Ask DNS no more, or never: the servers are those of `use_servers`."""
        if self._dns is not None:
            self._dns.close()
            self._dns = None

    async def model(self) -> ModelSignature:
        """Return what the model takes and returns. The server is asked once.

        Raises:
            ConnectFailed: no server answers within `Timeouts.connect_s`.
            ModelNotFound: the server has no such model.
        """
        self._check_open()
        if self._model is None:
            async with self._model_lock:
                self._model = self._model or await self._read_model()
        return self._model

    async def ready(self) -> bool:
        """Ask the servers whether one of them has the model loaded.

        Raises:
            ClientError: no server answers.
        """
        self._check_open()
        pool = await self._known_servers()
        failed: ClientError | None = None if pool.all else ConnectFailed(pool.fault)
        request = pb.ModelReadyRequest(name=self.model_name)
        for endpoint in pool.all:
            try:
                timeout_s = self.timeouts.connect_s
                reply = await endpoint.ready(request, timeout=timeout_s, metadata=self._metadata)
                if reply.ready:
                    return True
            except grpc.RpcError as error:
                failed = error_from_status(error, url=endpoint.url)
        if failed is not None:
            raise failed
        return False

    async def generate(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> Answer:
        """Generate a complete answer; arguments are those of `stream`.

        Cancelling the task cancels the request on the server, too. Raises the errors of `Client.generate`.
        """
        async with self.stream(prompt, **request) as stream:
            async for _ in stream:
                pass
            return stream.answer()

    @property
    def _pool(self) -> EndpointPool:  # type: ignore[override]
        """The channels. gRPC ties them to the running loop, so they are made when there is a loop."""
        if self._open_pool is None:
            self._open_pool = self._new_pool()
            self._loop = asyncio.get_running_loop()
            if self._dns is not None:
                self._dns.start()
        return self._open_pool

    def _connect(self, url: str) -> Endpoint:
        options = self._channel_options(url)
        channel = (
            grpc.aio.secure_channel(url, self._credentials, options)
            if self._credentials
            else grpc.aio.insecure_channel(url, options)
        )
        return Endpoint.from_channel(channel, url)

    def _on_dns(self, servers: Servers) -> None:
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take_in, servers)

    def _take_in(self, servers: Servers) -> None:
        if self._dns is None:
            return
        self._names, self._pool.fault = servers, self._dns.fault
        self.use_servers(servers)
        self._first_lookup.set()

    async def _known_servers(self) -> EndpointPool:
        """The channels, when DNS has said which there are, or has not for `Timeouts.connect_s`."""
        pool = self._pool
        if self._dns is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timeouts.connect_s):
                    await self._first_lookup.wait()
        return pool

    async def _read_model(self) -> ModelSignature:
        request, timeout_s, failures = pb.ModelConfigRequest(name=self.model_name), self.timeouts.connect_s, 0
        began = time.perf_counter()
        pool = await self._known_servers()
        while True:
            try:
                with pool.lease() as endpoint:
                    reply = await endpoint.config(request, timeout=timeout_s, metadata=self._metadata)
                    return read_signature(reply.config)
            except ClientError as error:
                failures += 1
                await asyncio.sleep(self._retry_delay_s(error, failures, began))


class AsyncStream(StreamBase):
    """The chunks of one answer, made by `AsyncClient.stream`. Read by one task.

    Reading raises the errors of `AsyncClient.generate`.

    Attributes:
        take_chunk: called in the event loop with each chunk but the last, while the task waits for it; whether it takes
            the chunk, which the task then does not get: that is cheaper than to wake a task. What it raises, reading
            raises. None: the task gets all chunks.
    """

    take_chunk: Callable[[Chunk], bool] | None = None
    _client: AsyncClient
    _chunk: Chunk | None = None
    _alarm: asyncio.TimerHandle | None = None
    # By the loop's clock.
    _deadline = math.inf
    # Set when the server was asked to end the answer: when the call is cancelled if it has not.
    _patience: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._prepare()
        self._model = await self._client.model()
        self._loop = asyncio.get_running_loop()
        self._start_attempt()
        self._client._streams.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client._streams.discard(self)
        if self._alarm is not None:
            self._alarm.cancel()
        self._end_attempt()
        if not self._state.finished:
            self._abort(Cancelled("the stream was left"))
        if self._patience is not None or (self._state.finished and self._aborted is None):
            await self._read_to_end()
        if self._patience is not None:
            self._patience.cancel()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        state = self._state
        while not state.finished:
            try:
                return await self._next_chunk()
            except ClientError as error:
                await asyncio.sleep(self._count_failed_attempt(error))
                if self._aborted is not None:
                    raise self._aborted from None
                self._start_attempt()
                state = self._state
        raise StopAsyncIteration

    async def _read_to_end(self) -> None:
        """Read what comes after the answer is complete, or was ended; not for long."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await MessageReads(
                    self._call, self._call.cancel, self._loop, lambda message: message is not grpc.aio.EOF
                )
        except (grpc.RpcError, TimeoutError):
            pass
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise

    async def _next_chunk(self) -> Chunk:
        """Wait for the next chunk that `take_chunk` does not take, or the last."""
        state = self._state
        self._set_deadline(self._read_timeout_s)
        try:
            message = await MessageReads(self._call, self._end_early, self._loop, self._take)
        except asyncio.CancelledError:
            if self._aborted is None or _task_is_cancelled():
                raise
            raise self._aborted from None
        except grpc.RpcError as error:
            raise self._aborted or state.call_failed(error) from None
        finally:
            self._deadline = math.inf
        if self._aborted is not None:
            raise self._aborted
        if message is grpc.aio.EOF:
            raise state.ended_early()
        chunk, self._chunk = self._chunk, None
        assert chunk is not None, "it was not taken"
        return chunk

    def _take(self, message: Any) -> bool:
        """Take in a message, and wait for the next if it brings nothing that the task has to see."""
        if self._aborted is not None or message is grpc.aio.EOF:
            return False
        chunk = self._state.receive(message)
        if chunk is not None:
            assert self._endpoint is not None, "it sent the chunk"
            self._endpoint.last_chunk_at = time.monotonic()
            if chunk.finish_reason is not None or self.take_chunk is None or not self.take_chunk(chunk):
                self._chunk = chunk
                return False
        self._set_deadline(self._read_timeout_s)
        return True

    def _end_early(self) -> None:
        if self._patience is not None:
            return
        request = self._stop_request()
        if request is None:
            self._call.cancel()
            return
        self._patience = self._loop.call_later(CLOSE_TIMEOUT_S, self._call.cancel)
        task = self._loop.create_task(self._send(request))
        self._client._closing.add(task)
        task.add_done_callback(self._client._closing.discard)

    async def _send(self, request: pb.ModelInferRequest) -> None:
        assert self._endpoint is not None, "it has begun to answer"
        # If it does not arrive, the call is cancelled.
        with contextlib.suppress(grpc.RpcError):
            async for _ in self._endpoint.infer(
                request, timeout=CLOSE_TIMEOUT_S, metadata=self._client._metadata
            ):
                pass

    def _set_deadline(self, timeout_s: float | None) -> None:
        """One timer serves all reads of a stream: it is moved when it goes off, not at each token."""
        if timeout_s is None:
            return
        deadline = self._deadline = self._loop.time() + timeout_s
        alarm = self._alarm
        if alarm is not None:
            if alarm.when() <= deadline:
                return
            alarm.cancel()
        self._alarm = self._loop.call_at(deadline, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        if self._deadline <= self._loop.time():
            self._on_deadline()
        elif self._deadline < math.inf:
            self._alarm = self._loop.call_at(self._deadline, self._on_alarm)


def _task_is_cancelled() -> bool:
    """Whether a CancelledError is that of the task, and not that of a call which this side has cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
