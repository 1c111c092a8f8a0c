"""A deployment as the gateway serves it: its client, its template and tokenizer, its places, its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.cache.aio import AsyncCachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.client import AsyncClient, ChatTemplate
from pipeline.client.template import as_prompt
from pipeline.gateway.admission import Admission
from pipeline.gateway.errors import ApiError


class Tokenizer(Protocol):
    """What the gateway needs of the `tokenizers` library."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask for, in tokens."""

    max_input_tokens: int
    max_output_tokens: int


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
    _caching: dict[str, AsyncCachingClient] = field(default_factory=dict)  # tenant -> client

    def client(self, tenant: str) -> AsyncClient | AsyncCachingClient:
        """The client for the next request of a tenant: tenants share no answers."""
        if self.cache is None:
            return self.plain
        if tenant not in self._caching:
            origin = Origin(self.deployment, self.name, tenant)
            self._caching[tenant] = AsyncCachingClient(self.plain, self.cache, origin)
        return self._caching[tenant]

    def prompt_tokens(self, prompt: str | Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> int:
        """How long the prompt is for the engine.

        Raises:
            ApiError: 400, if it is longer than the engine takes.
            Refused: the template does not take the messages.
        """
        text = as_prompt(prompt, self.template, tools)
        tokens = len(self.tokenizer.encode(text).ids)
        if tokens > self.bounds.max_input_tokens:
            raise ApiError(
                400,
                f"This model takes prompts of at most {self.bounds.max_input_tokens} tokens; yours has {tokens}",
                param="prompt" if isinstance(prompt, str) else "messages",
                code="context_length_exceeded",
            )
        return tokens

    async def aclose(self) -> None:
        """Ends all connections."""
        await self.plain.aclose()
        if self.cache is not None:
            self.cache.close()
