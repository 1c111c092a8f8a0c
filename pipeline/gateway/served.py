"""A deployment as the gateway serves it: its client, its template and tokenizer, its places, its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.cache.aio import AsyncCachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit, Sampling
from pipeline.client.sampling import PARAMETERS
from pipeline.client.template import as_prompt
from pipeline.gateway.admission import Admission
from pipeline.gateway.embeddings import Embeds
from pipeline.gateway.errors import ApiError
from pipeline.gateway.log_probs import Tokenizer

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
        text, bounds = as_prompt(prompt, self.template, tools), self.bounds
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
