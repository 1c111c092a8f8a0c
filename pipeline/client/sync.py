"""The blocking client. One may be shared by any number of threads.

A blocking gRPC read has no deadline of its own, so each client has one thread that cancels the reads that are late.
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Self, Unpack

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.answer import Answer, Chunk
from pipeline.client.base import CLOSE_TIMEOUT_S, ClientBase, StreamBase
from pipeline.client.discovery import Servers
from pipeline.client.endpoints import SINGLE_THREADED, Endpoint
from pipeline.client.errors import Cancelled, ClientError
from pipeline.client.prompt import Prompt
from pipeline.client.sampling import RequestOptions
from pipeline.client.tensors import ModelSignature, read_signature

# How long the thread of the deadlines waits for another stream before it ends.
_IDLE_S = 5.0


class Client(ClientBase["Stream"]):
    """Blocking client of a language model on Triton.

    Any number of threads may share one, over one connection per server.

    >>> with Client("localhost:8001") as client:                               # doctest: +SKIP
    ...     with client.stream("Once upon a time", max_tokens=64) as stream:
    ...         for chunk in stream:
    ...             print(chunk.text, end="", flush=True)
    ...     print(stream.stats.ttft_ms)
    """

    def _setup(self) -> None:
        self._stream_class = Stream
        self._deadlines = _DeadlineThread()
        self._model_lock = threading.Lock()
        self._pool = self._new_pool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Streams that are open raise `Cancelled`."""
        self._closed = True
        if self._dns is not None:
            self._dns.close()
        for endpoint in self._pool.every:
            endpoint.channel.close()

    def model(self) -> ModelSignature:
        """Return what the model takes and returns. The server is asked once.

        Raises:
            ConnectFailed: no server answers within `Timeouts.connect_s`.
            ModelNotFound: the server has no such model.
        """
        self._check_open()
        with self._model_lock:
            if self._model is None:
                self._model = self._read_model()
            return self._model

    def generate(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> Answer:
        """Generate a complete answer; arguments are those of `stream`.

        Raises:
            Refused: a parameter or the prompt is wrong; `PromptTooLong` is one of them.
            ModelNotFound: the server has no such model.
            ConnectFailed: no server could be reached.
            DeadlineExceeded: one of the `Timeouts` has passed.
            Cancelled: the server or `close` stopped the answer.
            ServerFailed: the answer broke off; `ServerLost` with the server, `Busy` if the server's queue is full.
            RuntimeError: the client is closed.
        """
        with self.stream(prompt, **request) as stream:
            for _ in stream:
                pass
            return stream.answer()

    def _connect(self, url: str) -> Endpoint:
        options = [*self._channel_options(url), SINGLE_THREADED]
        channel = (
            grpc.secure_channel(url, self._credentials, options)
            if self._credentials
            else grpc.insecure_channel(url, options)
        )
        return Endpoint.from_channel(channel, url)

    def _on_dns(self, servers: Servers) -> None:
        if self._closed or self._dns is None:
            return
        self._names, self._pool.fault = servers, self._dns.fault
        if servers:
            self._pool.update(servers, self._connect)
        for endpoint in self._pool.take_drained():
            endpoint.channel.close()

    def _read_model(self) -> ModelSignature:
        request, timeout_s, failures = pb.ModelConfigRequest(name=self.model_name), self.timeouts.connect_s, 0
        began = time.perf_counter()
        if self._dns is not None:
            self._dns.start()
            self._dns.first_lookup.wait(timeout_s)
        while True:
            try:
                with self._pool.lease() as endpoint:
                    reply = endpoint.config(request, timeout=timeout_s, metadata=self._metadata)
                    return read_signature(reply.config)
            except ClientError as error:
                failures += 1
                time.sleep(self._retry_delay_s(error, failures, began))


class Stream(StreamBase):
    """The chunks of one answer, made by `Client.stream`. Read by one thread, cancelled from any.

    Reading raises the errors of `Client.generate`.
    """

    _client: Client
    # By `time.monotonic()`; set while a read waits.
    _deadline = math.inf

    def __enter__(self) -> Self:
        self._prepare()
        self._model = self._client.model()
        self._start_attempt()
        self._client._deadlines.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_attempt()
        deadlines = self._client._deadlines
        try:
            self._abort(Cancelled("the stream was left"))
            deadlines.set(self, CLOSE_TIMEOUT_S)
            # The answer is complete, or was ended: whatever comes now.
            with contextlib.suppress(grpc.RpcError):
                collections.deque(self._call, maxlen=0)
        finally:
            deadlines.remove(self)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        state = self._state
        while not state.finished:
            try:
                chunk = state.receive(self._read())
            except ClientError as error:
                time.sleep(self._count_failed_attempt(error))
                if self._aborted is not None:
                    raise self._aborted from None
                self._start_attempt()
                state = self._state
                continue
            if chunk is not None:
                assert self._endpoint is not None, "it sent the chunk"
                self._endpoint.last_chunk_at = time.monotonic()
                return chunk
        raise StopIteration

    def _read(self) -> bytes:
        deadlines, state = self._client._deadlines, self._state
        deadlines.set(self, self._read_timeout_s)
        try:
            if self._aborted is not None:
                raise self._aborted
            message: bytes = next(self._call)
        except StopIteration:
            raise self._aborted or state.ended_early() from None
        except grpc.RpcError as error:
            raise self._aborted or state.call_failed(error) from None
        finally:
            self._deadline = math.inf
        if self._aborted is not None:
            raise self._aborted
        return message

    def _end_early(self) -> None:
        request = self._stop_request()
        if request is None:
            self._call.cancel()
            return
        assert self._endpoint is not None, "it has begun to answer"
        # If the server does not end the answer, the call is cancelled.
        self._client._deadlines.set(self, CLOSE_TIMEOUT_S)
        with contextlib.suppress(grpc.RpcError):
            answers = self._endpoint.infer(request, timeout=CLOSE_TIMEOUT_S, metadata=self._client._metadata)
            collections.deque(answers, maxlen=0)


class _DeadlineThread:
    """Calls `_on_deadline` of streams whose read is late: one thread for all streams of a client."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: set[Stream] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf

    def add(self, stream: Stream) -> None:
        with self._changed:
            self._streams.add(stream)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pipeline-client-deadlines", daemon=True
                )
                self._thread.start()

    def remove(self, stream: Stream) -> None:
        with self._changed:
            self._streams.discard(stream)

    def set(self, stream: Stream, timeout_s: float | None) -> None:
        """Set the deadline of a stream's next read; the stream takes it back itself when the read is over."""
        if timeout_s is None:
            return
        with self._changed:
            stream._deadline = time.monotonic() + timeout_s
            if stream._deadline < self._wakes_at:
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            idle_since = time.monotonic()
            while True:
                now = time.monotonic()
                for stream in [stream for stream in self._streams if stream._deadline <= now]:
                    stream._deadline = math.inf
                    stream._on_deadline()
                if self._streams:
                    idle_since = now
                elif now - idle_since >= _IDLE_S:
                    self._thread = None
                    return
                soonest = min((stream._deadline for stream in self._streams), default=math.inf)
                self._wakes_at = min(soonest, now + _IDLE_S)
                self._changed.wait(max(0.0, self._wakes_at - time.monotonic()))
