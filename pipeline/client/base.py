"""What the blocking and the asyncio client have in common: settings, the request of a stream, and what it tells."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import failures
from pipeline.client.channel import KeepAlive, metadata, options, target
from pipeline.client.chunk import Answer, FinishReason
from pipeline.client.endpoints import Endpoint, Endpoints, Retries
from pipeline.client.errors import (
    BetweenTokensDeadline,
    Busy,
    Cancelled,
    ClientError,
    ConnectFailed,
    FirstTokenDeadline,
    Refused,
)
from pipeline.client.exchange import Exchange
from pipeline.client.model import Model
from pipeline.client.prompt import PromptLimit, as_prompt
from pipeline.client.request import build_request
from pipeline.client.sampling import Sampling, Value, read_sampling
from pipeline.client.stats import Stats
from pipeline.client.timeouts import Timeouts
from pipeline.client.top_logprobs import Likeliest
from pipeline.models.chat_template import ChatTemplate, Message

Prompt = str | Sequence[Message]
# After its last message a server closes the call; leaving sooner would look like a cancellation to it.
GOODBYE_S = 1.0


class ClientBase:
    """Where requests go, and with which settings.

    `url` may name several servers with the same model; each request goes to the healthy one with the fewest requests.

    `template` is needed for messages only. With a `prompt_limit`, a prompt that the engine does not take is not sent.
    `defaults` are sampling parameters for every request. `headers` are sent with every call; `credentials` (of
    `grpc.ssl_channel_credentials`) make it TLS.
    """

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
    ) -> None:
        self.urls = tuple(target(one) for one in ([url] if isinstance(url, str) else url))
        if not self.urls:
            raise Refused("no url: name host:port of at least one server")
        self.url = ", ".join(self.urls)
        self.model_name = model
        self.template = template
        self.prompt_limit = prompt_limit
        self.timeouts = timeouts or Timeouts()
        self.defaults: Mapping[str, Any] = {**(defaults or {})}  # sampling parameters of every request
        self._metadata = metadata(headers or {})
        self._keep_alive = keep_alive or KeepAlive()
        self._options = options(self._keep_alive)
        self._credentials = credentials
        self.retries = retries or Retries()
        self._model: Model | None = None
        self._closed = False
        self._prepare()

    def _prepare(self) -> None:
        """What a kind of client has beside the settings."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, model={self.model_name!r})"

    def _wait_before_attempt(self, attempt: int, error: grpc.RpcError, endpoint: Endpoint) -> float:
        """How long to wait (s) before the model is asked for once more; raises why not, if the failure is final."""
        reason = failures.from_status(error, url=endpoint.url)
        if not isinstance(reason, ConnectFailed) or attempt > self.retries.attempts:
            raise reason from None
        return 0.0 if len(self.urls) >= attempt else self.retries.wait_s(attempt - 1)

    def _not_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")


class StreamBase:
    """One request: made from its arguments when its block is entered, then asked about."""

    def __init__(
        self,
        client: ClientBase,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        request_id: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.request_id = request_id or uuid.uuid4().hex
        self._client = client
        self._prompt, self._tools = prompt, tools
        self._given = {**client.defaults, **sampling}
        self._running: Exchange | None = None
        self._call: Any = None
        self._stopped: ClientError | None = None  # why we broke the call off
        self._endpoint: Endpoint | None = None  # where it is, or was last, asked
        self._held = False  # whether it counts as under way there
        self._failures = 0
        self._first_sent = 0.0

    @property
    def text(self) -> str:
        """All text so far."""
        return self._exchange.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None until it has."""
        return self._exchange.finish_reason

    @property
    def stats(self) -> Stats:
        """The figures up to now."""
        return self._exchange.stats()

    def answer(self) -> Answer:
        """The whole answer, once all chunks have been read."""
        if not self._exchange.finished:
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        return self._exchange.answer()

    def cancel(self) -> None:
        """Stop the answer, on the server too. Whoever reads it gets `Cancelled`."""
        self._stop(Cancelled("the answer was cancelled"))

    @property
    def _exchange(self) -> Exchange:
        if self._running is None:
            raise RuntimeError("a stream is read inside of its `with` block")
        return self._running

    def _check(self) -> None:
        """What can be told without asking the server."""
        if self._running is not None:
            raise RuntimeError("a stream is entered once; make a new one for each request")
        self._client._not_closed()
        self._sampling = read_sampling(self._given)
        self._text = as_prompt(self._prompt, self._client.template, self._tools)
        if self._client.prompt_limit is not None:
            self._client.prompt_limit.check(self._text)

    def _request(self, model: Model) -> pb.ModelInferRequest:
        request = build_request(model, self._text, self._sampling, request_id=self.request_id)
        max_tokens = self._sampling.get("max_tokens")
        self._running = Exchange(
            model,
            url=self._endpoint.url if self._endpoint else self._client.url,
            request_id=self.request_id,
            max_tokens=max_tokens if isinstance(max_tokens, int) else None,
            likeliest=_likeliest(self._sampling),
        )
        return request

    def _take(self, endpoints: Endpoints) -> Endpoint:
        self._endpoint, self._held = endpoints.take(avoid=self._endpoint), True
        self._first_sent = self._first_sent or time.perf_counter()
        return self._endpoint

    def _wait_before_retry(self, error: ClientError, endpoints: Endpoints) -> float:
        """How long to wait (s) before asking again; raises `error` if it is final."""
        self._failures += 1
        self._give_back(endpoints, failed=isinstance(error, ConnectFailed))
        started = self._running is not None and self._running.started
        if started or self._stopped is not None or not isinstance(error, ConnectFailed | Busy):
            raise error
        retries, patience_s = self._client.retries, self._client.timeouts.first_token_s
        wait_s = 0.0 if len(endpoints.all) > self._failures else retries.wait_s(self._failures)
        late = patience_s is not None and time.perf_counter() + wait_s - self._first_sent >= patience_s
        if self._failures >= retries.attempts or late:
            raise error
        return wait_s

    def _give_back(self, endpoints: Endpoints, *, failed: bool = False) -> None:
        if self._endpoint is not None and self._held:
            self._held = False
            endpoints.give_back(self._endpoint, failed=failed)

    @property
    def _patience_s(self) -> float | None:
        """How long the next read may take."""
        timeouts = self._client.timeouts
        return timeouts.between_tokens_s if self._exchange.started else timeouts.first_token_s

    def _too_late(self) -> None:
        timeouts = self._client.timeouts
        if self._exchange.finished:
            self._call.cancel()
        elif self._exchange.started:
            self._stop(
                BetweenTokensDeadline(f"the answer stalled: nothing for {timeouts.between_tokens_s:g} s")
            )
        else:
            self._stop(FirstTokenDeadline(f"no first token within {timeouts.first_token_s:g} s"))

    def _stop(self, reason: ClientError) -> None:
        if self._call is not None and self._stopped is None and not self._exchange.finished:
            self._stopped = self._exchange.over(reason)
            self._call.cancel()

    def _leave(self) -> None:
        """The block ends: what is still running is cancelled."""
        self._stop(Cancelled("the stream was left"))


def _likeliest(sampling: Mapping[str, Value]) -> Likeliest | None:
    """How many tokens of each position are wanted, after the temperature that the engine applies; 0 is greedy."""
    count, temperature = sampling.get("top_log_probs"), sampling.get("temperature")
    if not isinstance(count, int):
        return None
    return Likeliest(count, temperature if isinstance(temperature, float) and temperature else 1.0)
