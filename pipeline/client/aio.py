"""The asyncio client: the same requests, chunks, figures and errors as the blocking one."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import failures
from pipeline.client.base import GOODBYE_S, ClientBase, Prompt, StreamBase
from pipeline.client.chunk import Answer, Chunk
from pipeline.client.context import request_headers
from pipeline.client.endpoints import Endpoint, Endpoints
from pipeline.client.errors import Cancelled, ClientError
from pipeline.client.model import Model, read_model
from pipeline.client.sampling import Sampling


class AsyncClient(ClientBase):
    """Streams answers of a model on a Triton server; belongs to the event loop that uses it first.

    >>> async with AsyncClient("localhost:8001") as client:                    # doctest: +SKIP
    ...     async with client.stream("Once upon a time", max_tokens=64) as stream:
    ...         async for chunk in stream:
    ...             print(chunk.text, end="", flush=True)
    """

    def _prepare(self) -> None:
        self._reading_model = asyncio.Lock()
        self._opened: Endpoints | None = None
        self._streams: set[AsyncStream] = set()  # inside of their block

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the connection; streams that are open raise `Cancelled`."""
        self._closed = True
        if self._opened is not None:
            for stream in tuple(self._streams):
                stream._stop(Cancelled("the client is closed"))
            for endpoint in self._opened.all:
                await endpoint.channel.close()

    async def model(self) -> Model:
        """What the model takes and gives; the server is asked once."""
        self._not_closed()
        if self._model is None:
            async with self._reading_model:
                self._model = self._model or await self._read_model()
        return self._model

    async def ready(self) -> bool:
        """Whether one of the servers has the model loaded, asked now. ClientError if none can be asked."""
        self._not_closed()
        failed: ClientError | None = None
        request = pb.ModelReadyRequest(name=self.model_name)
        for endpoint in self._open().all:
            try:
                timeout_s = self.timeouts.connect_s
                reply = await endpoint.ready(request, timeout=timeout_s, metadata=self._metadata)
                if reply.ready:
                    return True
            except grpc.RpcError as error:
                failed = failures.from_status(error, url=endpoint.url)
        if failed is not None:
            raise failed
        return False

    async def _read_model(self) -> Model:
        """From the first server that answers."""
        request, endpoints = pb.ModelConfigRequest(name=self.model_name), self._open()
        timeout_s = self.timeouts.connect_s
        attempt = 1
        while True:
            try:
                with endpoints.lent() as endpoint:
                    reply = await endpoint.config(request, timeout=timeout_s, metadata=self._metadata)
                    return read_model(reply.config)
            except grpc.RpcError as error:
                attempt += 1
                wait_s = self._wait_before_attempt(attempt, error, endpoint)
            await asyncio.sleep(wait_s)

    def stream(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """An answer, chunk by chunk. It is asked for on entering the block, and cancelled on leaving it."""
        return AsyncStream(self, prompt, sampling, request_id, tools)

    async def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """A whole answer."""
        async with self.stream(prompt, request_id=request_id, tools=tools, **sampling) as stream:
            async for _ in stream:
                pass
            return stream.answer()

    def _open(self) -> Endpoints:
        """The channels; gRPC ties them to the running loop, hence not before there is one."""
        if self._opened is None:
            self._opened = Endpoints([self._connect(url) for url in self.urls])
        return self._opened

    def _connect(self, url: str) -> Endpoint:
        if self._credentials:
            return Endpoint.on(grpc.aio.secure_channel(url, self._credentials, self._options), url)
        return Endpoint.on(grpc.aio.insecure_channel(url, self._options), url)


class AsyncStream(StreamBase):
    """The chunks of one answer. Made by `AsyncClient.stream`; read by one task."""

    _client: AsyncClient
    _alarm: asyncio.TimerHandle | None = None
    _waits_until = math.inf  # by the loop's clock

    async def __aenter__(self) -> Self:
        self._check()
        self._model = await self._client.model()
        self._loop = asyncio.get_running_loop()
        self._send()
        self._client._streams.add(self)
        return self

    def _send(self) -> None:
        endpoint = self._take(self._client._open())
        request = self._request(self._model)
        self._exchange.sent(self._first_sent)
        self._call = endpoint.infer(request, metadata=self._client._metadata + request_headers.get())

    async def __aexit__(self, *_: object) -> None:
        self._client._streams.discard(self)
        if self._exchange.finished:
            with contextlib.suppress(
                grpc.RpcError, TimeoutError
            ):  # the answer is complete, whatever comes now
                async with asyncio.timeout(GOODBYE_S):
                    await self._call.read()
        if self._alarm is not None:
            self._alarm.cancel()
        self._give_back(self._client._open())
        self._leave()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        exchange = self._exchange
        while not exchange.finished:
            try:
                chunk = exchange.receive(await self._read())
            except ClientError as error:
                await asyncio.sleep(self._wait_before_retry(error, self._client._open()))
                if self._stopped is not None:
                    raise self._stopped from None
                self._send()
                exchange = self._exchange
                continue
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _read(self) -> pb.ModelStreamInferResponse:
        exchange = self._exchange
        self._arm(self._patience_s)
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped is None or (task is not None and task.cancelling()):
                raise  # the task is being cancelled, not the call
            raise self._stopped from None
        except grpc.RpcError as error:
            raise self._stopped or exchange.broken(error) from None
        finally:
            self._waits_until = math.inf
        if message is grpc.aio.EOF:
            raise self._stopped or exchange.broken_off()
        return message

    def _arm(self, within_s: float | None) -> None:
        """One timer serves all reads of a stream: it is moved when it goes off, not at each token."""
        if within_s is None:
            return
        until = self._waits_until = self._loop.time() + within_s
        alarm = self._alarm
        if alarm is not None:
            if alarm.when() <= until:
                return
            alarm.cancel()
        self._alarm = self._loop.call_at(until, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._waits_until <= self._loop.time():
            self._too_late()
        elif self._waits_until < math.inf:
            self._alarm = self._loop.call_at(self._waits_until, self._ring)
