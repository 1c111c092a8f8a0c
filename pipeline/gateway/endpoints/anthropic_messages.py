"""Anthropic's Messages API: POST /v1/messages, and how many tokens a message would read."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.client import PromptTooLong
from pipeline.gateway.anthropic_messages import AnthropicMessage, CountTokensRequest, MessagesRequest
from pipeline.gateway.endpoints.endpoint import ApiEndpoint
from pipeline.gateway.endpoints.generating import Asker, GeneratingEndpoints
from pipeline.gateway.errors import ApiError


class MessageEndpoints(GeneratingEndpoints):
    """Messages."""

    def too_long(self, error: PromptTooLong) -> ApiError:
        # By these words clients know that they have to shorten the conversation.
        text = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        return ApiError(400, text, code="context_length_exceeded")

    def endpoints(self) -> Sequence[ApiEndpoint]:
        return (
            ApiEndpoint(
                "POST", "/v1/messages", self._create, "Answer a conversation, as Anthropic's API does.",
                request=MessagesRequest, direct=True,
            ),
            ApiEndpoint(
                "POST", "/v1/messages/count_tokens", self._count, "Count the tokens that a message would read.",
                request=CountTokensRequest,
            ),
        )  # fmt: skip

    async def _create(self, request: Request) -> Response:
        return await self.generate(request, MessagesRequest, _message, prompt_field="messages")

    async def _count(self, request: Request) -> Response:
        checked = await self.check(request, CountTokensRequest, _message, prompt_field="messages")
        return JSONResponse({"input_tokens": checked.generation.prompt_tokens})


def _message(body: CountTokensRequest, asker: Asker) -> AnthropicMessage:
    return AnthropicMessage(body, asker.model, asker.tenant, asker.record.id, asker.record.span)
