"""The core of both clients: settings, the request of a stream, its attempts, retries and deadlines. No I/O.

`sync` and `aio` add what waits: channels, reads, sleeps and the timers of deadlines.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, Unpack

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.answer import Answer, FinishReason, PartialAnswer, Stats
from pipeline.client.discovery import DnsWatch, Servers, is_name
from pipeline.client.endpoints import Endpoint, EndpointPool, channel_options, checked_metadata, parse_target
from pipeline.client.errors import (
    BetweenTokensDeadline,
    Busy,
    Cancelled,
    ClientError,
    ConnectFailed,
    FirstTokenDeadline,
    Refused,
)
from pipeline.client.log_probs import TopLogProbsRequest
from pipeline.client.prompt import Prompt, PromptLimit, prompt_token_ids, render_prompt
from pipeline.client.request import attempt_id, build_request, build_stop_request
from pipeline.client.sampling import RequestOptions, Sampling, SamplingValue, read_sampling
from pipeline.client.settings import KeepAlive, Retries, Timeouts
from pipeline.client.spreading import SPREADS, Spread, affinity_key, prompt_beginning
from pipeline.client.stream_state import StreamState
from pipeline.client.tensors import ModelSignature
from pipeline.models.chat_template import ChatTemplate

# After its final response a server closes the call; to leave sooner would look like a cancellation to it.
CLOSE_TIMEOUT_S = 1.0

# Headers of every stream that is opened in the current context, beside the client's own: `traceparent`, for example.
request_headers: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("request_headers", default=())


StreamT = TypeVar("StreamT", bound="StreamBase")


class ClientBase(Generic[StreamT]):
    """Servers that requests go to, and the settings of all requests."""

    _stream_class: type[StreamT]
    _pool: EndpointPool

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        model: str = "tensorrt_llm_bls",
        template: ChatTemplate | None = None,
        defaults: Sampling | None = None,
        timeouts: Timeouts | None = None,
        keep_alive: KeepAlive | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retries: Retries | None = None,
        prompt_limit: PromptLimit | None = None,
        spread: Spread = "affinity",
        slots: int | None = None,
    ) -> None:
        """Make a client. It connects with its first request.

        Args:
            url: host:port of Triton's gRPC service, or those of several servers with the same model. `dns:NAME:PORT`
                stands for all addresses of a DNS name, which is asked again every few seconds.
            model: name of the entry model, which takes and returns text.
            template: renders prompts that are chat messages, and tools.
            defaults: sampling parameters of every request; those of a request win.
            timeouts: how long to wait.
            keep_alive: pings on silent connections.
            headers: sent with every call. Names are lower case; the values of those that end in `-bin` are bytes.
            credentials: for TLS, made by `grpc.ssl_channel_credentials`.
            retries: when to repeat a request that failed before its first token.
            prompt_limit: refuses a prompt with more tokens than the engine takes before it is sent.
            spread: which of several healthy servers gets a request. `affinity`: all turns of a conversation go to the
                same one, which has their KV cache, unless it has more than four requests and twice its share of those
                in flight; `least-load`: the server with the fewest requests in flight; `random`: any.
            slots: requests that each server takes at once, where that is known; affinity sends no more to one while
                another has room.

        Raises:
            Refused: a URL or a header is malformed, or there is no such spread.
        """
        self.urls = tuple(map(parse_target, [url] if isinstance(url, str) else url))
        if not self.urls:
            raise Refused("no url: name host:port of at least one server")
        if spread not in SPREADS:
            raise Refused(f"spread = {spread!r}: must be one of {', '.join(SPREADS)}")
        self.url = ", ".join(self.urls)
        self.model_name = model
        self.template = template
        self.prompt_limit = prompt_limit
        self.spread, self.slots = spread, slots
        self.timeouts = timeouts or Timeouts()
        self.retries = retries or Retries()
        self.defaults: Mapping[str, Any] = {**(defaults or {})}
        self._metadata = checked_metadata(headers or {})
        self._options = channel_options(keep_alive or KeepAlive())
        self._credentials = credentials
        self._dns = DnsWatch(self.urls, self._on_dns) if any(map(is_name, self.urls)) else None
        # host:port -> its DNS name, which is in its certificate.
        self._names: Servers = {}
        self._model: ModelSignature | None = None
        self._closed = False
        self._setup()

    def stream(self, prompt: Prompt, **request: Unpack[RequestOptions]) -> StreamT:
        """Make a stream: entering its `with` block sends the request, leaving the block early cancels it.

        Args:
            prompt: text, token ids (sent as they are), or chat messages, which need the client's `template`.
            **request: see `RequestOptions`.

        Returns:
            The stream. Entering and reading it raise the errors of `generate`.
        """
        return self._stream_class(self, prompt, request)

    def _setup(self) -> None:
        raise NotImplementedError

    def _on_dns(self, servers: Servers) -> None:
        """Take over the servers that DNS returned; called in a thread."""
        raise NotImplementedError

    def _connect(self, url: str) -> Endpoint:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, model={self.model_name!r})"

    def _new_pool(self) -> EndpointPool:
        """Make the pool, with those servers whose addresses are known without DNS."""
        endpoints = [self._connect(url) for url in self.urls if not is_name(url)]
        return EndpointPool(endpoints, spread=self.spread, slots=self.slots)

    def _channel_options(self, url: str) -> list[tuple[str, Any]]:
        name = self._names.get(url) if self._credentials else None
        return [*self._options, *([("grpc.ssl_target_name_override", name)] if name else [])]

    def _retry_delay_s(self, error: ClientError, failures: int, began: float) -> float:
        """Return the seconds to wait before the next attempt; 0 while there are servers that have not been asked.

        Args:
            error: why the last attempt failed; it is raised if there is no next attempt.
            failures: attempts that have failed.
            began: when the first attempt began, by `time.perf_counter()`.
        """
        lost = isinstance(error, ConnectFailed)
        waits = lost and time.perf_counter() - began < self.retries.wait_s
        if not waits and not ((lost or isinstance(error, Busy)) and failures < self.retries.attempts):
            raise error
        return 0.0 if len(self._pool.all) > failures else self.retries.backoff_s(failures)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")


class StreamBase:
    """One request and its answer. The request is built when the stream's block is entered."""

    _model: ModelSignature

    def __init__(self, client: ClientBase[Any], prompt: Prompt, request: RequestOptions) -> None:
        sampling: dict[str, Any] = {**client.defaults, **request}
        self.request_id: str = sampling.pop("request_id", None) or uuid.uuid4().hex
        self._client = client
        self._prompt = prompt
        self._tools: Sequence[Mapping[str, Any]] = sampling.pop("tools", None) or ()
        self._affinity: str | None = sampling.pop("affinity", None)
        self._prior: PartialAnswer | None = sampling.pop("prior", None)
        self._unchecked = sampling
        self._entered_state: StreamState | None = None
        self._call: Any = None
        # Why this side broke the call off.
        self._aborted: ClientError | None = None
        # The server of the last attempt, and whether the request counts as in flight there.
        self._endpoint: Endpoint | None = None
        self._in_flight = False
        self._attempt_id = ""
        self._failures = 0
        self._first_sent = 0.0

    @property
    def text(self) -> str:
        """The text so far."""
        return self._state.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended, or None if it has not ended; see `Chunk.finish_reason`."""
        return self._state.finish_reason

    @property
    def stats(self) -> Stats:
        """Timing and token counts so far."""
        return self._state.stats()

    def answer(self) -> Answer:
        """Return the complete answer, once all chunks have been read.

        Raises:
            RuntimeError: the stream has not been read to its end.
        """
        if not self._state.finished:
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        return self._state.answer()

    def cancel(self) -> None:
        """Stop the answer, on the server too. The task or thread that reads the stream gets `Cancelled`."""
        self._abort(Cancelled("the answer was cancelled"))

    @property
    def _state(self) -> StreamState:
        if self._entered_state is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._entered_state

    def _prepare(self) -> None:
        """Check and render the request, as far as that needs no server."""
        if self._entered_state is not None:
            raise RuntimeError("a stream is entered once; make a new one for each request")
        self._client._check_open()
        self._sampling = read_sampling(self._unchecked)
        ids = prompt_token_ids(self._prompt)
        if ids and self._tools:
            raise Refused("tools need messages: token ids hold all that the model is told")
        self._content = ids or render_prompt(self._prompt, self._client.template, self._tools)
        if self._client.prompt_limit is not None:
            self._client.prompt_limit.check(self._content)

    @property
    def sent_at(self) -> float | None:
        """Time when the request was first sent, by `time.perf_counter`; None before."""
        return self._first_sent or None

    def _start_attempt(self) -> None:
        """Choose a server and start the call, with a fresh state."""
        self._client._check_open()
        pool, model = self._client._pool, self._model
        self._attempt_id = attempt_id(self.request_id)
        request = build_request(
            model, self._content, self._sampling, request_id=self._attempt_id, prior=self._prior
        )
        endpoint = self._endpoint = pool.acquire(avoid=self._endpoint, key=self._affinity_key(pool))
        self._in_flight = True
        self._first_sent = self._first_sent or time.perf_counter()
        max_tokens = self._sampling.get("max_tokens")
        self._entered_state = StreamState(
            model,
            url=endpoint.url,
            request_id=self.request_id,
            max_tokens=max_tokens if isinstance(max_tokens, int) else None,
            top_log_probs=_top_log_probs_request(self._sampling),
            prior=self._prior,
            sent_at=self._first_sent,
        )
        self._call = endpoint.infer(request, metadata=self._client._metadata + request_headers.get())

    def _affinity_key(self, pool: EndpointPool) -> int | None:
        """Return the key of the request for affinity; None where there is nothing to choose."""
        if pool.spread != "affinity" or len(pool.all) < 2:
            return None
        return affinity_key(prompt_beginning(self._prompt) if self._affinity is None else self._affinity)

    def _end_attempt(self, *, failed: bool = False) -> None:
        if self._endpoint is not None and self._in_flight:
            self._in_flight = False
            self._client._pool.release(self._endpoint, failed=failed)

    def _count_failed_attempt(self, error: ClientError) -> float:
        """Count a failed attempt; return the seconds to wait before the next.

        Raises `error` if there is no next: part of the answer has come, or attempts or time are used up.
        """
        self._failures += 1
        self._end_attempt(failed=isinstance(error, ConnectFailed))
        if self._aborted is not None or self._state.started:
            raise error
        delay_s = self._client._retry_delay_s(error, self._failures, self._first_sent)
        limit_s = self._client.timeouts.first_token_s
        if limit_s is not None and time.perf_counter() + delay_s - self._first_sent >= limit_s:
            raise error
        return delay_s

    @property
    def _read_timeout_s(self) -> float | None:
        timeouts = self._client.timeouts
        return timeouts.between_tokens_s if self._state.started else timeouts.first_token_s

    def _on_deadline(self) -> None:
        timeouts = self._client.timeouts
        if self._state.finished or self._aborted is not None:
            self._call.cancel()
        elif self._state.started:
            self._abort(
                BetweenTokensDeadline(f"the answer stalled: nothing for {timeouts.between_tokens_s:g} s")
            )
        else:
            self._abort(FirstTokenDeadline(f"no first token within {timeouts.first_token_s:g} s"))

    def _abort(self, reason: ClientError) -> None:
        """Break the call off, unless it is over; the reader gets `reason`."""
        if self._call is not None and self._aborted is None and not self._state.finished:
            self._aborted = self._state.fail(reason)
            if isinstance(reason, Cancelled) and not self._client._closed:
                self._end_early()
            else:
                self._call.cancel()

    def _end_early(self) -> None:
        """Have the server end an answer that has begun, as if it were complete; or cancel the call.

        A call that is cancelled at the moment when its answer ends can end Triton 24.10 as a whole (server issue 8034).
        """
        raise NotImplementedError

    def _stop_request(self) -> pb.ModelInferRequest | None:
        """Request that ends the answer; None if the answer has not begun, or the model takes no such request."""
        return build_stop_request(self._model, self._attempt_id) if self._state.started else None


def _top_log_probs_request(sampling: Mapping[str, SamplingValue]) -> TopLogProbsRequest | None:
    k, temperature = sampling.get("top_log_probs"), sampling.get("temperature")
    if not isinstance(k, int):
        return None
    bias = sampling.get("logit_bias")
    return TopLogProbsRequest(
        k,
        # Temperature 0 is greedy: the logits stay as they are.
        temperature if isinstance(temperature, float) and temperature else 1.0,
        bias if isinstance(bias, dict) else {},
    )
