"""A deployment as the gateway serves it: its client, its template and tokenizer, its places, its cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cache.aio import AsyncCachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit, Refused, Sampling
from pipeline.client.prompt import render_prompt
from pipeline.client.sampling import PARAMETERS
from pipeline.errors import UserError
from pipeline.gateway.embeddings import Embeds
from pipeline.gateway.errors import ApiError
from pipeline.gateway.log_probs import Tokenizer
from pipeline.gateway.queue import Admission
from pipeline.models.chat_template import TemplateError
from pipeline.triton.deployment import Deployment

_log = logging.getLogger("pipeline.gateway")

# Parameter of the engine -> what asks for it, and what the engine then needs.
_ABILITIES = {
    "guide_type": ("response_format or tool_choice", "guided decoding"),
    "log_probs": ("logprobs", "log probabilities"),
    "top_log_probs": ("top_logprobs or logprobs", "log probabilities but those of the chosen tokens"),
    "stop": ("stop", "stop words"),
    "bad_words": ("bad_words", "bad words"),
    "seed": ("seed", "seeds"),
    "presence_penalty": ("presence_penalty", "presence penalty"),
    "frequency_penalty": ("frequency_penalty", "frequency penalty"),
    "repetition_penalty": ("repetition_penalty", "repetition penalty"),
    "min_tokens": ("min_tokens", "least number of tokens"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask for, in tokens."""

    max_input_tokens: int
    max_output_tokens: int
    max_chars_per_token: int | None = None  # that a token of a prompt can stand for; None: any number


@dataclass(slots=True)
class Served:
    """One model that requests may name."""

    name: str
    created: int  # s since the epoch
    deployment: str  # digest of the package
    plain: AsyncClient
    template: ChatTemplate | None
    tokenizer: Tokenizer
    bounds: Bounds
    admission: Admission
    cache: ResponseCache | None = None
    embedder: Embeds | None = None
    guides: bool = True  # whether its engine was started with guided decoding
    likeliest: bool = True  # whether its engine returns logits
    _caching: dict[str, AsyncCachingClient] = field(default_factory=dict)  # tenant -> client

    @classmethod
    def of_package(
        cls, name: str, package: Path, urls: Sequence[str], *, cache: ResponseCache | None, max_waiting: int
    ) -> Served:
        """The model of a package, whose tokenizer and limits are used.

        Args:
            package: the folder of deployment.json.
            urls: host:port of the gRPC of each Triton server that runs it.
            cache: in front of it; None: every request is generated.
            max_waiting: how many requests may wait for a place.

        Raises:
            UserError: its tokenizer cannot be read.
        """
        deployment = Deployment.load(package)
        tokenizer = package / deployment.tokenizer_dir
        limits = deployment.limits
        try:
            prompts = PromptLimit.from_tokenizer(tokenizer, limits.max_input_tokens)
        except Refused as error:
            raise UserError(str(error)) from error
        counter: Any = prompts.tokenizer
        template = template_of(tokenizer)
        return cls(
            name=name,
            created=int((package / "deployment.json").stat().st_mtime),
            deployment=deployment.digest,
            plain=AsyncClient(urls, model=deployment.entry_model, template=template),
            template=template,
            tokenizer=counter,
            bounds=Bounds(limits.max_input_tokens, limits.max_output_tokens, prompts.max_chars_per_token),
            admission=Admission(limits.max_concurrency, max_waiting=max_waiting),
            cache=cache,
            embedder=embedder_of(cache),
            guides=deployment.guided_decoding,
            likeliest=deployment.runtime == "cpu",  # other engines return logits only if they were built to
        )

    def client(self, tenant: str) -> AsyncClient | AsyncCachingClient:
        """The client for the next request of a tenant: tenants share no answers."""
        if self.cache is None:
            return self.plain
        if tenant not in self._caching:
            origin = Origin(self.deployment, self.name, tenant)
            self._caching[tenant] = AsyncCachingClient(self.plain, self.cache, origin)
        return self._caching[tenant]

    def prompt(
        self, prompt: str | Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, int]:
        """The prompt as the engine gets it, and how many tokens that is.

        Safe to call from any number of threads.

        Raises:
            PromptTooLong: the engine takes fewer tokens.
            Refused: the template does not take the messages.
        """
        text, bounds = render_prompt(prompt, self.template, tools), self.bounds
        limit = PromptLimit(self.tokenizer, bounds.max_input_tokens, bounds.max_chars_per_token)
        return text, limit.check(text)

    async def able(self, sampling: Sampling) -> None:
        """
        Raises:
            ApiError: 400, if the deployed model cannot do what a request asks for.
            ClientError: the deployment does not say what its model is.
        """
        model = await self.plain.model()
        for name, (param, what) in _ABILITIES.items():
            lacks = not {"guide_type": self.guides, "top_log_probs": self.likeliest}.get(name, True)
            if sampling.get(name) and (lacks or model.input_named(PARAMETERS[name].tensors) is None):
                text = f"{param}: this deployment has no {what}"
                raise ApiError(400, text, param=param, code="unsupported_parameter")

    async def aclose(self) -> None:
        """Ends all connections."""
        await self.plain.aclose()
        if self.cache is not None:
            self.cache.close()


def template_of(tokenizer: Path) -> ChatTemplate | None:
    """The chat template of a packaged tokenizer; None where there is none: such a model completes texts only."""
    try:
        return ChatTemplate.from_directory(tokenizer).compile()
    except TemplateError as error:
        _log.warning("no chats: %s", error)
        return None


def embedder_of(cache: ResponseCache | None) -> Embedder | None:
    """What a cache compares questions with, where it does."""
    layer = None if cache is None else cache.semantic
    embedder = layer.embedder if isinstance(layer, SemanticLayer) else None
    return embedder if isinstance(embedder, Embedder) else None
