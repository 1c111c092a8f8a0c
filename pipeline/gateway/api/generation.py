"""Generation of all choices of one request, within the limits of the tenant and in the queue of the model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from pipeline.client import Chunk, FinishReason, Sampling, Stats
from pipeline.client.sampling import PARAMETERS, is_neutral
from pipeline.gateway.api.bounds import MAX_FAULTS
from pipeline.gateway.api.parsing import unsupported
from pipeline.gateway.api.prompts import Content, RenderedPrompt, render_prompts
from pipeline.gateway.api.response_format import AnswerForm
from pipeline.gateway.api.schema import ChatRequest, GenerationRequest
from pipeline.gateway.api.tools.choice import RequestTools, resolve_tools
from pipeline.gateway.api.tools.dialects import AnswerFormat
from pipeline.gateway.api.tools.history import REASONING_VARIABLES
from pipeline.gateway.api.tools.parser import AnswerParser
from pipeline.gateway.blame import Work
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.lost_servers import work_digest
from pipeline.gateway.served_model import ServedModel, model_not_found
from pipeline.gateway.text_processes import CpuMeter
from pipeline.gateway.traces import Span

# Sampling parameters that the engine gets as requests name them. All others depend on something besides.
_TAKEN = tuple(
    name
    for name in PARAMETERS
    if name in GenerationRequest.model_fields
    and name not in ("max_tokens", "temperature", "stop", "top_p", "top_k", "min_p", "seed")
)
_SEED_BITS = 63
_SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of two choices, which would else be equal


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Prompts, tools and form of a request with one model."""

    prompts: Sequence[RenderedPrompt]
    tools: RequestTools
    form: AnswerForm | None  # form that the engine holds each answer to


@dataclass(slots=True)
class ChoiceTimes:
    """When each step of one choice was taken, by `time.perf_counter()`; None: not yet.

    Attributes:
        requested: it asked for a slot of the model.
        started: it got a slot.
        sent: the request was sent, or the cache had the answer.
        first_chunk: the first chunk came.
        last_chunk: the last chunk so far came.
        ended: the choice is over.
        finish_reason: the engine's; None if the choice broke off.
        span: span of the call of the model, if spans are exported; parent of Triton's own.
    """

    requested: float
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
    """A generation and its figures. It may be made in any thread; its methods are for the event loop.

    Making a generation raises `ApiError` (400), `PromptTooLong`, or `ClientError` if the template does not take the
    messages.

    Choices are numbered as OpenAI does: all of the first prompt, then all of the next. While none of them has been sent
    to the model, the generation follows when its model is replaced by another package.
    """

    model: ServedModel
    tenant: Tenant
    request: GenerationRequest
    contents: Sequence[Content]  # prompts: text, token ids, or messages
    request_id: str
    span: Span  # span of the request
    inputs: ModelInputs = field(init=False)
    adapter: str | None = field(init=False)  # LoRA adapter that answers; None: the base
    stats: dict[int, Stats] = field(default_factory=dict)  # by choice, of those that began and are over
    retries: int = 0  # how often a choice was asked again, from its start or onward
    times: dict[int, ChoiceTimes] = field(default_factory=dict)  # by choice
    texts: dict[int, str] = field(default_factory=dict)  # by choice, of those that began and are over
    reasoning: dict[int, list[str]] = field(default_factory=dict)  # by choice, in pieces

    # Takes a chunk of the only choice as soon as it has come, or leaves it to `generate`; None: `generate` has all.
    take_chunk: Callable[[Chunk], bool] | None = None

    _digests: list[str] = field(init=False)  # digests of the request with each prompt; see `lost_servers`
    resumed: int = 0  # choices that went on after their server was lost
    broken: int = 0  # choices that had begun, and ended with the loss of their server

    _losses: int = 0  # most losses of servers that one choice was in flight at
    _losses_kept: int = 0  # losses of the request that its tenant counts
    _sent: set[int] = field(default_factory=set)  # choices that the model generates, or has
    _seeds: dict[int, int] = field(default_factory=dict)  # by choice, of requests without a seed
    _binding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.adapter = self.model.adapter_of(self.request.model)
        self.inputs = self._inputs_for(self.model)
        self._digests = [
            work_digest(self.tenant.name, self.model.name, prompt.sent, self.sampling(first)[0])
            for prompt, first in zip(
                self.inputs.prompts, range(0, self.choices, self.request.candidates), strict=True
            )
        ]

    def _inputs_for(self, model: ServedModel) -> ModelInputs:
        """Check the request against a model, render its prompts, and count their tokens."""
        request, chat = self.request, isinstance(self.request, ChatRequest)
        if chat and model.template is None:
            raise unsupported("model", "This model has no chat template: ask /v1/completions")
        if request.ttl_s is not None and model.cache is not None and request.ttl_s > model.cache.ttl_s:
            longest = f"this deployment keeps answers for at most {model.cache.ttl_s:g} s"
            raise ApiError(400, f"ttl_s: {request.ttl_s:g} is too long; {longest}", param="ttl_s")
        tools = RequestTools()
        if isinstance(request, ChatRequest):
            tags = model.guided_decoding and model.structural_tags
            tools = resolve_tools(request, model.template, model.schema_faults, structural_tags=tags)
        form = request.form(model.schema_faults)
        if tools.guide is not None:
            form = AnswerForm("json_schema", tools.guide, "tools")
        elif tools.tag is not None:
            form = AnswerForm("structural_tag", tools.tag, "tools")
        if model.strict and tools.unguided:
            places = ", ".join(f"tools.{index}.function.strict" for index in tools.unguided[:MAX_FAULTS])
            raise unsupported(
                "tools", f"{places}: this deployment cannot hold calls of tools to their schemas"
            )
        if model.strict and (request.output_token_limit or 0) > model.max_output_tokens:
            raise _too_many_tokens(request, model.max_output_tokens)
        if self.adapter is not None and self.adapter not in model.adapters:
            raise model_not_found(request.model, model.names)
        model.tokenizer.check_ids(list(request.logit_bias or ()), "logit_bias")
        guided = form is not None and (tools.tag is None or (tools.must and not model.answer_format.channels))
        prompts = render_prompts(request, self.contents, model, tools, guided=guided)
        return ModelInputs(prompts, tools, form)

    @property
    def model_name(self) -> str:
        """Name of the model in answers: its own, with the adapter that the request asks for."""
        return self.model.name if self.adapter is None else f"{self.model.name}:{self.adapter}"

    @property
    def operation(self) -> str:
        """Kind of the answer, as OpenTelemetry names it: "chat" or "text_completion"."""
        return "chat" if isinstance(self.request, ChatRequest) else "text_completion"

    @property
    def unread(self) -> Set[str]:
        """Fields of a chat about its reasoning that the model's chat template has no variable for."""
        request, template = self.request, self.model.template
        if not isinstance(request, ChatRequest) or template is None:
            return frozenset()
        reasoning_fields = {"thinking": request.thinking, "reasoning_effort": request.reasoning_effort}
        return {
            name
            for name, value in reasoning_fields.items()
            if value is not None and template.words.isdisjoint(REASONING_VARIABLES[name])
        }

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

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts together that nothing was computed for: in the engine's KV cache, or, with the whole
        answer, in the response cache. Of several choices of a prompt, the one with the fewest counts: the others found
        what it left.
        """
        fewest: dict[int, int] = {}
        for index, stats in self.stats.items():
            number, most = index // self.request.candidates, self.prompt_of(index).tokens
            tokens = most if stats.cached else min(stats.cached_tokens or 0, most)
            fewest[number] = min(tokens, fewest.get(number, most))
        return sum(fewest.values())

    def prompt_of(self, index: int) -> RenderedPrompt:
        """Return the prompt of choice `index`."""
        return self.inputs.prompts[index // self.request.candidates]

    @property
    def answer_format(self) -> AnswerFormat:
        """Format of answers: an answer that is held to a form has neither reasoning nor special tokens."""
        own, tools, request = self.model.answer_format, self.tools, self.request
        form = self.inputs.form
        if not isinstance(request, ChatRequest) or (form is not None and form.kind != "structural_tag"):
            return AnswerFormat(tools.dialect)
        special = own.special if request.skip_special_tokens is not False else frozenset()
        return replace(own, dialect=tools.dialect or (own.dialect if own.channels else None), special=special)

    def answer_parser(self, index: int) -> AnswerParser | None:
        """Make the parser of choice `index`; None if its text is all that there is."""
        format, tools = self.answer_format, self.tools.tools if self.tools.dialect is not None else ()
        if not tools and not format.reasons:
            return None
        sent = self.prompt_of(index).sent
        chosen = self.tools
        prompt = sent if isinstance(sent, str) and format.reasons and not chosen.begun else ""
        return AnswerParser(format, tools, max_calls=chosen.max_calls, prompt=prompt, begun=chosen.begun)

    def usage(self) -> dict[str, Any]:
        """Count tokens as OpenAI does: of all prompts, and of all choices. Those of long reasoning take a while."""
        completion = sum(stats.output_tokens or 0 for stats in self.stats.values())
        if self.request.output_token_limit == 0:
            completion = 0
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.answer_format.reasons:
            counted = sum(self.model.tokenizer.count("".join(texts)) for texts in self.reasoning.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": min(counted, completion)}
        return usage

    async def usage_aside(self) -> dict[str, Any]:
        """Count tokens as `usage` does: in a thread, if there is reasoning to count. Other streams go on meanwhile."""
        return await asyncio.to_thread(self.usage) if self.reasoning else self.usage()

    async def bind(self, index: int, *, goes_on: bool) -> bool:
        """Settle which package generates a choice, before it is sent, and return whether this model does.

        Args:
            index: number of the choice.
            goes_on: whether it has begun: then no other package can go on with it.
        """
        async with self._binding:
            if goes_on:
                return self.model.latest is self.model
            if not self._sent:
                await self.follow()
            self._sent.add(index)
            return True

    def unbind(self, index: int) -> None:
        """Forget all of a choice that is asked again from its start."""
        self.stats.pop(index, None)
        self._sent.discard(index)

    async def note_loss(self, losses: int) -> int:
        """Tell the tenant of the first choice that was in flight at so many losses; return what the tenant counts."""
        if losses > self._losses:
            self._losses = losses
            self._losses_kept = await self.tenant.note_loss(self.request_id)
        return self._losses_kept

    def work(self, index: int) -> Work:
        """Return what a choice is recognized by if a server is lost with it."""
        digest, tenant = self._digests[index // self.request.candidates], self.tenant
        return Work(digest, tenant.name, self.request_id, alone=tenant.background)

    async def follow(self) -> None:
        """Go over to what has replaced the model."""
        while (latest := self.model.latest) is not self.model:
            self.inputs = await asyncio.to_thread(CpuMeter().run, partial(self._inputs_for, latest))
            latest.hold()
            self.model.release()
            self.model = latest

    def sampling(self, index: int) -> tuple[Sampling, Sampling]:
        """Return the sampling parameters of a choice, and apart from them the seed that is drawn for it, if any."""
        request = self.request
        # OpenAI takes a top_p of 0, which leaves the most probable token.
        greedy = request.temperature == 0 or request.top_p == 0
        temperature = 0.0 if greedy else 1.0 if request.temperature is None else request.temperature
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
        fields = ((name, getattr(request, name)) for name in _TAKEN)
        same = {
            name: value for name, value in fields if value not in (None, []) and not is_neutral(name, value)
        }
        sampling: Sampling = {
            **cast(Sampling, same),
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "stop": [*stop, *self.tools.stop(self.model.answer_format)] or None,
            "log_probs": request.wants_log_probs or request.candidates > request.choices or None,
            "top_log_probs": request.num_top_logprobs or None,
            "prompt_log_probs": request.num_prompt_logprobs,
            "adapter": self.adapter,
            **({} if self.inputs.form is None else self.inputs.form.sampling),
        }
        format = self.answer_format
        if format.special and (format.reasons or format.dialect is not None):
            sampling["skip_special_tokens"] = False
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


def _too_many_tokens(request: GenerationRequest, most: int) -> ApiError:
    """Return the refusal of a limit that the engine does not reach: in vLLM's words, then in OpenAI's."""
    limit = request.output_token_limit
    text = (
        f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. This model supports at most {most} "
        f"completion tokens, whereas you provided {limit}."
    )
    return ApiError(400, text, param="max_tokens")
