"""A deployed model as the gateway serves it: its client, chat template, tokenizer, queue and response cache."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from pipeline.cache.backend import Vector
from pipeline.cache.client import AsyncCachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit, Refused, Retries, Sampling, Timeouts
from pipeline.client.prompt import render_prompt
from pipeline.client.request import missing_inputs
from pipeline.client.sampling import LOG_PROBS_INPUT
from pipeline.errors import UserError
from pipeline.gateway.api.response_format import SchemaFaults
from pipeline.gateway.api.tools.dialects import AnswerFormat
from pipeline.gateway.api.tools.history import template_messages
from pipeline.gateway.api.tools.prompt import answer_format, load_chat_template
from pipeline.gateway.errors import ApiError
from pipeline.gateway.fair_queue import FairQueue, ModelQueue
from pipeline.gateway.readiness import ModelReadiness, Readiness
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.text_processes import (
    LONG_SCHEMA_CHARS,
    ProcessTemplate,
    ProcessTokenizer,
    TextProcesses,
    is_long,
    prompt_chars,
)
from pipeline.gateway.text_server import schema_faults
from pipeline.gateway.tokenizer import ModelTokenizer
from pipeline.recipe import Recipe
from pipeline.triton.deployment import Deployment

_MAX_SCHEMAS = 256  # whose faults are remembered
# Sampling parameter -> field of a request that sets it, and what the engine needs for it; by default both are its name.
_ENGINE_FEATURES = {
    "guide_type": ("response_format or tool_choice", "guided decoding"),
    "log_probs": ("logprobs or best_of", "log probabilities"),
    "top_log_probs": ("top_logprobs or logprobs", "log probabilities but those of the chosen tokens"),
    "prompt_log_probs": ("prompt_logprobs, or echo with logprobs", "log probabilities of prompts"),
    "stop": ("stop", "stop words"),
    "bad_words": ("bad_words", "bad words"),
    "seed": ("seed", "seeds"),
    "presence_penalty": ("presence_penalty", "presence penalty"),
    "frequency_penalty": ("frequency_penalty", "frequency penalty"),
    "repetition_penalty": ("repetition_penalty", "repetition penalty"),
    "min_tokens": ("min_tokens", "least number of tokens"),
}


class EmbeddingModel(Protocol):
    """A sentence encoder; `pipeline.cache.semantic.embedder.Embedder` is one."""

    identity: str  # name of the model, and of its file
    max_tokens: int

    def __call__(self, text: str, /) -> Vector | None:
        """Embed a text; None if it is empty or longer than `max_tokens`."""

    def tokens(self, text: str, /) -> int:
        """Count the tokens of a text."""


@dataclass(slots=True)
class ServedModel:
    """One model that requests may name."""

    name: str
    created: int  # s since the epoch
    deployment: str  # digest of the package
    client: AsyncClient  # of its Triton servers, without the cache
    template: ChatTemplate | None  # None: it completes texts only
    prompt_limit: PromptLimit  # its tokenizer, and the longest prompt
    max_output_tokens: int
    queue: ModelQueue
    aliases: tuple[str, ...] = ()  # further names that requests may have
    adapters: tuple[str, ...] = ()  # LoRA adapters, which requests name behind a name and a colon
    # Whether unknown fields and too large limits are refused; see `pipeline.gateway.api.parsing`.
    strict: bool = False
    cache: ResponseCache | None = None
    embedder: EmbeddingModel | None = None
    guided_decoding: bool = True  # whether its engine was started with it
    structural_tags: bool = False  # whether that takes structural tags, too
    returns_logits: bool = True  # whether its engine returns logits
    replaced_by: ServedModel | None = None  # by what new requests go to instead
    stall_s: float = 5.0  # a stream that has begun and has no chunk for so long is counted as stalled
    max_wait_s: float = 30.0  # how long a request waits while the model is not ready
    slots_per_server: int | None = None  # of the queue, for each server that is well; None: those that it has
    processes: TextProcesses | None = None  # for long texts; None: all texts are worked on in this process
    tokenizer: ModelTokenizer = field(init=False)
    answer_format: AnswerFormat = field(init=False)  # by its chat template
    schema_faults: SchemaFaults = field(init=False)
    readiness: ModelReadiness = field(init=False)
    _caching_clients: dict[str, AsyncCachingClient] = field(default_factory=dict)  # by tenant
    _long_template: ChatTemplate | None = field(default=None, init=False)  # renders long chats
    holders: int = 0  # requests that are under way with it
    _unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        assert isinstance(self.queue, FairQueue), "workers share their own later"
        self.tokenizer = ModelTokenizer(self.prompt_limit.tokenizer, self.processes)
        if self.processes is not None:
            tokenizer = ProcessTokenizer(self.prompt_limit.tokenizer, self.processes)
            self.prompt_limit = replace(self.prompt_limit, tokenizer=tokenizer)
            if self.template is not None:
                self._long_template = ProcessTemplate(self.template, self.processes)
        self.answer_format = answer_format(self.template, self.tokenizer.special_tokens)
        self.schema_faults = lru_cache(_MAX_SCHEMAS)(self._find_schema_faults)
        self.readiness = Readiness(self.name, self.client, self.queue, slots_per_server=self.slots_per_server)

    @classmethod
    def from_package(
        cls,
        recipe: Recipe,
        package: Path,
        urls: Sequence[str],
        *,
        cache: ResponseCache | None = None,
        settings: GatewaySettings = GatewaySettings(),
    ) -> ServedModel:
        """Load the tokenizer and the limits of a packaged model.

        Args:
            recipe: gives its names, what requests may hold, and when a stream counts as stalled.
            package: the folder of deployment.json.
            urls: host:port of the gRPC of each Triton server that runs it, or dns:NAME:PORT for all of a name.
            cache: response cache; None generates every answer.

        Raises:
            UserError: its tokenizer cannot be read.
        """
        deployment, serving = Deployment.load(package), recipe.serving
        folder, limits = package / deployment.tokenizer_dir, deployment.limits
        tool_section, itl_ms = recipe.tool_prompt == "auto", recipe.slo.itl_p95_ms
        idle_timeout_s = settings.idle_timeout_s or None
        try:
            prompt_limit = PromptLimit.from_tokenizer(folder, limits.max_input_tokens)
        except Refused as error:
            raise UserError(str(error)) from error
        template = load_chat_template(folder, tool_section=tool_section)
        return cls(
            name=recipe.name,
            created=int((package / "deployment.json").stat().st_mtime),
            deployment=deployment.digest,
            client=AsyncClient(
                urls,
                model=deployment.entry_model,
                template=template,
                timeouts=Timeouts(first_token_s=idle_timeout_s, between_tokens_s=idle_timeout_s),
                # The gateway asks again itself, when the model is ready.
                retries=Retries(attempts=1),
                spread=settings.spread,
                slots=limits.max_concurrency,
            ),
            template=template,
            prompt_limit=prompt_limit,
            max_output_tokens=limits.max_output_tokens,
            queue=FairQueue(
                limits.max_concurrency, max_waiting=settings.max_waiting, background=settings.batch_slots
            ),
            aliases=serving.aliases,
            adapters=deployment.adapters,
            strict=serving.strict,
            cache=cache,
            embedder=semantic_embedder(cache),
            guided_decoding=deployment.guided_decoding,
            structural_tags=deployment.structural_tags,
            # Other engines return logits only if they were built to.
            returns_logits=deployment.runtime == "cpu",
            stall_s=5.0 if itl_ms is None else itl_ms / 100,
            max_wait_s=settings.max_wait_s,
            slots_per_server=limits.max_concurrency,
            processes=TextProcesses(folder, tool_section=tool_section),
        )

    def start(self) -> None:
        """Begin what goes on beside requests: probes, and the server of processes for long texts."""
        self.readiness.start()
        if self.processes is not None:
            self.processes.start()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may have, its own first, those with an adapter last."""
        names = (self.name, *self.aliases)
        return *names, *(f"{name}:{adapter}" for adapter in self.adapters for name in names)

    def adapter_of(self, name: str) -> str | None:
        """Return the adapter that one of `names` asks for; None for the base.

        Raises:
            ApiError: 404; the model has no such name.
        """
        if name in (self.name, *self.aliases):
            return None
        base, _, adapter = name.rpartition(":")
        if base in (self.name, *self.aliases) and adapter in self.adapters:
            return adapter
        raise model_not_found(name, self.names)

    @property
    def latest(self) -> ServedModel:
        """The model that new requests go to: this one, until it is replaced."""
        model = self
        while model.replaced_by is not None:
            model = model.replaced_by
        return model

    def hold(self) -> None:
        """Keep the model open for a request, until `release` is called."""
        self.holders += 1

    def release(self) -> None:
        """End what `hold` began."""
        self.holders -= 1
        if not self.holders:
            self._unused.set()

    async def wait_unused(self) -> None:
        """Wait until no request is under way with this model."""
        while self.holders:
            self._unused.clear()
            await self._unused.wait()

    def replace(self, model: ServedModel) -> None:
        """Let another package take over the queue, with its own number of slots.

        Requests that have not been sent yet go to it, in their order.
        """
        slots, model.queue = model.queue.slots, self.queue
        model.queue.resize(slots)
        model.readiness.take_over(self.readiness)
        self.replaced_by = model

    def client_for(self, tenant: str) -> AsyncClient | AsyncCachingClient:
        """Return the client for a tenant's requests. Tenants share no cached answers."""
        if self.cache is None:
            return self.client
        if tenant not in self._caching_clients:
            origin = Origin(self.deployment, self.name, tenant)
            self._caching_clients[tenant] = AsyncCachingClient(self.client, self.cache, origin)
        return self._caching_clients[tenant]

    def render_prompt(
        self,
        prompt: str | Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, int]:
        """Render a prompt by the chat template, and count its tokens. Safe to call from any thread.

        Args:
            prompt: a text, which stays as it is, or messages.
            variables: further variables of the template.

        Returns:
            The text that the engine gets, and its number of tokens.

        Raises:
            PromptTooLong: the engine takes fewer tokens.
            Refused: the template does not take the messages.
        """
        text = self.render(prompt, tools, variables)
        return text, self.prompt_limit.check(text)

    def render(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a prompt by the chat template; see `render_prompt`."""
        template = self.template
        if template is not None and not isinstance(prompt, str):
            prompt = template_messages(prompt, template, self.answer_format.dialect)
        if self._long_template is not None and not isinstance(prompt, str):
            long = is_long(prompt_chars(prompt, tools, variables))
            template = self._long_template if long else template
        return render_prompt(prompt, template, tools, variables or {})

    def _find_schema_faults(self, schema: str) -> Sequence[tuple[str, str]]:
        if self.processes is None or not is_long(len(schema), LONG_SCHEMA_CHARS):
            return schema_faults(schema)
        return [(path, fault) for path, fault in self.processes.do("schema_faults", text=schema)]

    async def check_supported(self, sampling: Sampling) -> None:
        """Check that the deployed engine has what a request asks for.

        Raises:
            ApiError: 400, with what it lacks.
            ClientError: Triton does not answer which inputs the model has.
        """
        model = await self.client.model()
        requested: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        top_log_probs = self.returns_logits or LOG_PROBS_INPUT in model.inputs
        engine_has = {"guide_type": self.guided_decoding, "top_log_probs": top_log_probs}
        lacking = [name for name, has in engine_has.items() if name in requested and not has]
        lacking += missing_inputs(model, requested)
        if lacking:
            param, feature = _ENGINE_FEATURES.get(lacking[0], (lacking[0], lacking[0]))
            text = f"{param}: this deployment has no {feature}"
            raise ApiError(400, text, param=param, code="unsupported_parameter")

    async def aclose(self) -> None:
        """Close all connections, and the cache."""
        await self.readiness.aclose()
        await self.client.aclose()
        if self.processes is not None:
            await asyncio.to_thread(self.processes.close)
        if self.cache is not None:
            self.cache.close()


def model_not_found(name: str, known: Sequence[str]) -> ApiError:
    """Return the refusal (404) of a model's name, with the names that there are."""
    text = f"The model `{name}` does not exist; there are: {', '.join(known)}"
    return ApiError(404, text, param="model", code="model_not_found")


def embedding_model_name(embedder: EmbeddingModel) -> str:
    """Return the name under which requests may ask for an encoder, beside that of the deployment."""
    return embedder.identity.partition("/")[0]


def semantic_embedder(cache: ResponseCache | None) -> Embedder | None:
    """Return the sentence encoder with which a cache compares questions, if it does."""
    layer = None if cache is None else cache.semantic
    embedder = layer.embedder if isinstance(layer, SemanticLayer) else None
    return embedder if isinstance(embedder, Embedder) else None
