"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from pipeline.gateway.completions import Completion
from pipeline.gateway.endpoints.answers import ChatAnswer, CompletionAnswer
from pipeline.gateway.endpoints.endpoint import ApiEndpoint
from pipeline.gateway.endpoints.generating import Asker, GeneratingEndpoints
from pipeline.gateway.schema import ChatRequest, CompletionRequest


class CompletionEndpoints(GeneratingEndpoints):
    """Chats and plain completions."""

    def endpoints(self) -> Sequence[ApiEndpoint]:
        return (
            ApiEndpoint(
                "POST", "/v1/chat/completions", self._chat, "Answer a chat.",
                request=ChatRequest, response=ChatAnswer, direct=True,
            ),
            ApiEndpoint(
                "POST", "/v1/completions", self._complete, "Continue a text.",
                request=CompletionRequest, response=CompletionAnswer, direct=True,
            ),
        )  # fmt: skip

    async def _chat(self, request: Request) -> Response:
        return await self.generate(request, ChatRequest, _completion, prompt_field="messages")

    async def _complete(self, request: Request) -> Response:
        return await self.generate(request, CompletionRequest, _completion, prompt_field="prompt")


def _completion(body: ChatRequest | CompletionRequest, asker: Asker) -> Completion:
    return Completion(body, asker.model, asker.tenant, asker.record.id, asker.record.span)
