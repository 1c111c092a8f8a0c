"""The blocking client. One may be shared by any number of threads."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.base import GOODBYE_S, ClientBase, Prompt, StreamBase
from pipeline.client.channel import single_threaded
from pipeline.client.chunk import Answer, Chunk
from pipeline.client.endpoints import Endpoint, Endpoints
from pipeline.client.errors import ClientError
from pipeline.client.model import Model, read_model
from pipeline.client.sampling import Sampling
from pipeline.client.watchdog import Watchdog


class Client(ClientBase):
    """Streams answers of a model on a Triton server.

    >>> with Client("localhost:8001") as client:                               # doctest: +SKIP
    ...     with client.stream("Once upon a time", max_tokens=64) as stream:
    ...         for chunk in stream:
    ...             print(chunk.text, end="", flush=True)
    ...     print(stream.stats.ttft_ms)
    """

    def _prepare(self) -> None:
        self._watchdog = Watchdog()
        self._reading_model = threading.Lock()
        self._endpoints = Endpoints([self._connect(url) for url in self.urls])

    def _connect(self, url: str) -> Endpoint:
        options = [*self._options, single_threaded()]
        channel = (
            grpc.secure_channel(url, self._credentials, options)
            if self._credentials
            else grpc.insecure_channel(url, options)
        )
        return Endpoint.on(channel, url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; streams that are open raise `Cancelled`."""
        self._closed = True
        for endpoint in self._endpoints.all:
            endpoint.channel.close()

    def model(self) -> Model:
        """What the model takes and gives; the server is asked once."""
        self._not_closed()
        with self._reading_model:
            if self._model is None:
                self._model = self._read_model()
            return self._model

    def _read_model(self) -> Model:
        """From the first server that answers."""
        request = pb.ModelConfigRequest(name=self.model_name)
        attempt = 1
        while True:
            try:
                with self._endpoints.lent() as endpoint:
                    reply = endpoint.config(request, timeout=self.timeouts.connect_s, metadata=self._metadata)
                    return read_model(reply.config)
            except grpc.RpcError as error:
                attempt += 1
                wait_s = self._wait_before_attempt(attempt, error, endpoint)
            time.sleep(wait_s)

    def stream(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """An answer, chunk by chunk. It is asked for on entering the `with` block, and cancelled on leaving it."""
        return Stream(self, prompt, sampling, request_id, tools)

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """A whole answer."""
        with self.stream(prompt, request_id=request_id, tools=tools, **sampling) as stream:
            for _ in stream:
                pass
            return stream.answer()


class Stream(StreamBase):
    """The chunks of one answer. Made by `Client.stream`; read by one thread, cancelled from any."""

    _client: Client
    waits_until = math.inf  # for the watchdog

    def __enter__(self) -> Self:
        self._check()
        self._model = self._client.model()
        self._client._watchdog.watch(self)
        self._send()
        return self

    def _send(self) -> None:
        endpoint = self._take(self._client._endpoints)
        request = self._request(self._model)
        self._exchange.sent(self._first_sent)
        self._call = endpoint.infer(request, metadata=self._client._metadata)

    def __exit__(self, *_: object) -> None:
        if self._exchange.finished:
            self._client._watchdog.arm(self, GOODBYE_S)
            with contextlib.suppress(grpc.RpcError):  # the answer is complete, whatever comes now
                collections.deque(self._call, maxlen=0)
        self._client._watchdog.forget(self)
        self._give_back(self._client._endpoints)
        self._leave()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        exchange = self._exchange
        while not exchange.finished:
            try:
                chunk = exchange.receive(self._read())
            except ClientError as error:
                time.sleep(self._wait_before_retry(error, self._client._endpoints))
                if self._stopped is not None:
                    raise self._stopped from None
                self._send()
                exchange = self._exchange
                continue
            if chunk is not None:
                return chunk
        raise StopIteration

    def too_late(self) -> None:
        """What was waited for did not come in time; called by the watchdog, on its thread."""
        self._too_late()

    def _read(self) -> pb.ModelStreamInferResponse:
        watchdog, exchange = self._client._watchdog, self._exchange
        watchdog.arm(self, self._patience_s)
        try:
            message: pb.ModelStreamInferResponse = next(self._call)
            return message
        except StopIteration:
            raise self._stopped or exchange.broken_off() from None
        except grpc.RpcError as error:
            raise self._stopped or exchange.broken(error) from None
        finally:
            watchdog.disarm(self)
