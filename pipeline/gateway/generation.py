"""Generation of all choices of one request, within the limits of the tenant and in the queue of the model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.cache.client import AsyncCachedStream, AsyncCachingClient
from pipeline.cache.response_cache import ResponseCache
from pipeline.client import (
    AsyncStream,
    Busy,
    Chunk,
    ConnectFailed,
    FinishReason,
    Refused,
    Retries,
    Sampling,
    ServerLost,
    Stats,
)
from pipeline.client.spreading import prompt_beginning
from pipeline.gateway.background import Preempted
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.prompts import Content, RenderedPrompt, render_prompts
from pipeline.gateway.response_format import AnswerForm
from pipeline.gateway.schema import ChatRequest, GenerationRequest
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.tools.choice import RequestTools, resolve_tools
from pipeline.gateway.traces import Span, propagate

_SEED_BITS = 63
_MAX_ATTEMPTS = 3
# A request that kills the engine must not do so again and again, until its supervisor gives up: of the attempts, those
# that a server took and was lost with.
_MAX_LOST = 2
_BACKOFF = Retries()
_SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of two choices, which would else be equal


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a request comes to with one model."""

    prompts: Sequence[RenderedPrompt]
    tools: RequestTools
    form: AnswerForm | None  # that the engine holds each answer to


@dataclass(slots=True)
class ChoiceTimes:
    """When each step of one choice was taken, by `time.perf_counter()`; None: not yet.

    Attributes:
        asked: it asked for a slot of the model.
        started: it got one.
        sent: the cache had no answer, or there is none, and the request was sent; or the answer was found.
        first_chunk: of the answer.
        last_chunk: of the answer so far.
        ended: the choice is over.
        finish_reason: the engine's; None if the choice broke off.
        span: of the call of the model, if spans are exported; parent of Triton's own.
    """

    asked: float
    started: float | None = None
    sent: float | None = None
    first_chunk: float | None = None
    last_chunk: float | None = None
    ended: float | None = None
    finish_reason: FinishReason | None = None
    span: Span | None = None

    def is_stalled(self, now: float, stall_s: float) -> bool:
        """Whether the choice has begun, and had no chunk for `stall_s` seconds."""
        return self.last_chunk is not None and self.ended is None and now - self.last_chunk > stall_s


@dataclass(slots=True)
class Generation:
    """What is to be generated, and how it went. It may be made in any thread; its methods are for the event loop.

    Choices are numbered as OpenAI does: all of the first prompt, then all of the next. While none of them has been sent
    to the model, the generation follows when its model is replaced by another package.
    """

    model: ServedModel
    tenant: Tenant
    request: GenerationRequest
    contents: Sequence[Content]  # of each prompt: text, token ids, or messages
    request_id: str
    span: Span  # of the request
    inputs: ModelInputs = field(init=False)
    stats: dict[int, Stats] = field(default_factory=dict)  # by choice, of those that began and are over
    retries: int = 0  # how often a choice was asked again
    times: dict[int, ChoiceTimes] = field(default_factory=dict)  # by choice
    texts: dict[int, str] = field(default_factory=dict)  # by choice, of those that began and are over

    _sent: set[int] = field(default_factory=set)  # choices that the model generates, or has
    _seeds: dict[int, int] = field(default_factory=dict)  # by choice, of requests without a seed
    _binding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        """Raises what `_inputs_for` does."""
        self.inputs = self._inputs_for(self.model)

    def _inputs_for(self, model: ServedModel) -> ModelInputs:
        """Check the request against a model, render its prompts, and count their tokens.

        Raises:
            ApiError: 400, with what is wrong.
            PromptTooLong: a prompt has more tokens than the engine takes.
            ClientError: the template does not take the messages.
        """
        request, chat = self.request, isinstance(self.request, ChatRequest)
        if chat and model.template is None:
            text = "This model has no chat template: ask /v1/completions"
            raise ApiError(400, text, param="model", code="unsupported_parameter")
        _check_ttl(request.ttl_s, model.cache)
        tools = resolve_tools(request, model.template) if isinstance(request, ChatRequest) else RequestTools()
        form = request.form()
        if tools.guide is not None:
            form = AnswerForm("json_schema", tools.guide, "tools")
        check_output_limit(request, model.max_output_tokens)
        model.tokenizer.check_ids(list(request.logit_bias or ()), "logit_bias")
        return ModelInputs(render_prompts(request, self.contents, model, tools), tools, form)

    @property
    def operation(self) -> str:
        """Which kind of answer is wanted, as OpenTelemetry names it: "chat" or "text_completion"."""
        return "chat" if isinstance(self.request, ChatRequest) else "text_completion"

    @property
    def tools(self) -> RequestTools:
        """Tools of the request."""
        return self.inputs.tools

    @property
    def max_tokens(self) -> int:
        """Most tokens of each choice."""
        limit, most = self.request.output_token_limit, self.model.max_output_tokens
        return most if limit is None else max(1, min(limit, most))

    @property
    def choices(self) -> int:
        """Number of answers that are generated, to all prompts together."""
        return len(self.contents) * self.request.candidates

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together; each counts once, however many choices it has."""
        return sum(prompt.tokens for prompt in self.inputs.prompts)

    def prompt_of(self, index: int) -> RenderedPrompt:
        """Return the prompt of choice `index`."""
        return self.inputs.prompts[index // self.request.candidates]

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Generate all choices at once. Each waits for a slot of its own.

        Yields:
            Index of a choice, and its next chunk.

        Raises:
            ApiError, ClientError, or an ExceptionGroup of them if there are several choices.
        """
        self.model.hold()
        try:
            await self._follow()
            tokens = sum(self.prompt_of(index).tokens + self.max_tokens for index in range(self.choices))
            async with self.tenant.enforce_limits(tokens, self.choices):
                if self.choices > 1:
                    async with aclosing(self._merged()) as pairs:
                        async for pair in pairs:
                            yield pair
                    return
                async with aclosing(self._choice(0)) as chunks:
                    async for chunk in chunks:
                        yield 0, chunk
        finally:
            self.model.release()

    def usage(self) -> dict[str, Any]:
        """Count tokens as OpenAI does: of all prompts, and of all choices."""
        completion = sum(stats.output_tokens or 0 for stats in self.stats.values())
        if self.request.output_token_limit == 0:
            completion = 0
        cached = self.prompt_tokens if any(stats.cached for stats in self.stats.values()) else 0
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def _merged(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        arrived: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()

        async def read(index: int) -> None:
            async with aclosing(self._choice(index)) as chunks:
                async for chunk in chunks:
                    arrived.put_nowait((index, chunk))
            arrived.put_nowait((index, None))

        async with asyncio.TaskGroup() as group:
            for index in range(self.choices):
                group.create_task(read(index))
            left = self.choices
            while left:
                index, chunk = await arrived.get()
                if chunk is None:
                    left -= 1
                else:
                    yield index, chunk

    async def _choice(self, index: int) -> AsyncGenerator[Chunk, None]:
        """Generate one choice. If its server is lost before any of it went out, the model is asked again."""
        arrived, asked = time.monotonic(), time.perf_counter()
        attempt, lost = 1, 0
        while True:
            self.times[index], begun = ChoiceTimes(asked), False
            try:
                async with aclosing(self._attempt(index, arrived)) as chunks:
                    # A whole answer is handed on when it is complete, so that it can be asked again in any state.
                    if not self.request.stream:
                        for chunk in [chunk async for chunk in chunks]:
                            yield chunk
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except (ConnectFailed, ServerLost, Busy) as error:
                if not isinstance(error, Busy):
                    self.model.readiness.suspect(error.url, str(error))
                lost += isinstance(error, ServerLost) or (isinstance(error, ConnectFailed) and error.taken)
                if begun or attempt == _MAX_ATTEMPTS or lost == _MAX_LOST:
                    raise
                if isinstance(error, Busy):
                    await asyncio.sleep(_BACKOFF.backoff_s(attempt))
                attempt += 1
                self.retries += 1
            except Preempted:
                pass
            self.stats.pop(index, None)
            self._sent.discard(index)

    async def _attempt(self, index: int, arrived: float) -> AsyncGenerator[Chunk, None]:
        times = self.times[index]
        tokens = self.prompt_of(index).tokens + self.max_tokens
        self.model.readiness.start()
        queue, tenant, wait_s = self.model.queue, self.tenant, self.model.max_wait_s
        async with queue.slot(
            tokens, tenant.name, wait_s=wait_s, arrived=arrived, background=tenant.background
        ):
            times.started = time.perf_counter()
            async with self._binding:
                if not self._sent:
                    await self._follow()
                self._sent.add(index)
            sampling, drawn = self._sampling(index)
            await self.model.check_supported(sampling)
            async with self._stream(index, sampling, drawn) as stream:
                times.sent = time.perf_counter()
                try:
                    async for chunk in stream:
                        times.last_chunk = time.perf_counter()
                        if times.first_chunk is None:
                            times.first_chunk = times.last_chunk
                        if chunk.finish_reason is not None:
                            times.finish_reason = chunk.finish_reason
                        yield chunk
                except Refused as error:
                    form = self.inputs.form
                    if form is not None and (unsupported := form.unsupported(error)):
                        raise unsupported from error
                    raise
                finally:
                    times.ended = time.perf_counter()
                    if times.first_chunk is not None:
                        self.stats[index], self.texts[index] = self._counted(stream), stream.text

    def _counted(self, stream: AsyncStream | AsyncCachedStream) -> Stats:
        """The figures of a stream; where it broke off before the model counted its tokens, the tokenizer does."""
        stats = stream.stats
        if stats.output_tokens is None and stream.finish_reason is None:
            return replace(stats, output_tokens=self.model.tokenizer.count(stream.text))
        return stats

    async def _follow(self) -> None:
        """Go over to what has replaced the model."""
        while (latest := self.model.latest) is not self.model:
            self.inputs = await asyncio.to_thread(self._inputs_for, latest)
            latest.hold()
            self.model.release()
            self.model = latest

    def _stream(self, index: int, sampling: Sampling, drawn: Sampling) -> AsyncStream | AsyncCachedStream:
        client, prompt = self.model.client_for(self.tenant.name), self.prompt_of(index)
        if self.span.recording:
            name = f"{self.operation} {self.model.name}"
            self.times[index].span = span = self.span.start_child(name, client=True)
            propagate(span)
        request_id = self.request_id if self.choices == 1 else f"{self.request_id}-{index}"
        if isinstance(client, AsyncCachingClient):
            return client.stream(
                prompt.content,
                request_id=request_id,
                tools=self.tools.tools,
                rendered=prompt.sent if isinstance(prompt.sent, str) else None,
                affinity=self._affinity(prompt),
                variables=prompt.variables,
                cache=self.request.cache,
                ttl_s=self.request.ttl_s,
                unkeyed=drawn,
                **sampling,
            )
        sampling.update(drawn)
        return client.stream(prompt.sent, request_id=request_id, affinity=self._affinity(prompt), **sampling)

    def _affinity(self, prompt: RenderedPrompt) -> str | None:
        """What the request goes to the same server by as the turns before it; None where there is one server."""
        client = self.model.client
        if client.spread != "affinity" or len(client.endpoints) < 2:
            return None
        return self.request.prompt_cache_key or prompt_beginning(prompt.content)

    def _sampling(self, index: int) -> tuple[Sampling, Sampling]:
        """Sampling parameters of a choice, and apart from them the seed that is drawn if the request has none."""
        request = self.request
        # OpenAI takes a top_p of 0, which leaves the most probable token.
        greedy = request.temperature == 0 or request.top_p == 0
        temperature = 0.0 if greedy else 1.0 if request.temperature is None else request.temperature
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
        sampling: Sampling = {
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "stop": [*stop, *self.tools.stop] or None,
            "stop_token_ids": request.stop_token_ids or None,
            "include_stop_str_in_output": request.include_stop_str_in_output or None,
            "skip_special_tokens": False if request.skip_special_tokens is False else None,
            "ignore_eos": request.ignore_eos or None,
            "logit_bias": request.logit_bias or None,
            "presence_penalty": request.presence_penalty or None,
            "frequency_penalty": request.frequency_penalty or None,
            "repetition_penalty": request.repetition_penalty,
            "min_tokens": request.min_tokens,
            "bad_words": request.bad_words or None,
            "log_probs": request.wants_log_probs or request.candidates > request.choices or None,
            "top_log_probs": request.num_top_logprobs or None,
            "prompt_log_probs": request.num_prompt_logprobs,
            **({} if self.inputs.form is None else self.inputs.form.sampling),
        }
        if greedy:
            return sampling, {}
        sampling |= {
            "top_p": request.top_p or 1.0,
            "top_k": max(request.top_k or 0, 0),
            "min_p": request.min_p or None,
        }
        if request.seed is None:
            return sampling, {"seed": self._seeds.setdefault(index, random.getrandbits(_SEED_BITS))}
        sampling["seed"] = (request.seed + index % request.candidates * _SEED_STEP) % 2**_SEED_BITS
        return sampling, {}


def check_output_limit(request: GenerationRequest, most: int) -> None:
    """Check that a request does not want longer answers than the engine gives.

    Args:
        request: of the client.
        most: tokens that the engine generates.

    Raises:
        ApiError: 400, if it does; it begins with vLLM's words and goes on with OpenAI's.
    """
    limit = request.output_token_limit
    if limit is None or limit <= most:
        return
    text = (
        f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. This model supports at most {most} "
        f"completion tokens, whereas you provided {limit}."
    )
    raise ApiError(400, text, param="max_tokens")


def _check_ttl(ttl_s: float | None, cache: ResponseCache | None) -> None:
    """Check that a request does not want its answer cached for longer than the recipe allows.

    Raises:
        ApiError: 400, if it does.
    """
    if ttl_s is None or cache is None or ttl_s <= cache.lifetime.static_s:
        return
    text = f"ttl_s: {ttl_s:g} is too long; this deployment keeps answers for at most {cache.lifetime.static_s:g} s"
    raise ApiError(400, text, param="ttl_s")
