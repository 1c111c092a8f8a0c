"""OpenAI's Responses API: POST /v1/responses, and what is kept of the responses."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.gateway.api.model_answer import AnswerContext, GeneratingEndpoints
from pipeline.gateway.api.models import list_page
from pipeline.gateway.api.parsing import unsupported, validate_request
from pipeline.gateway.api.responses.answer import ModelResponse, RecalledResponses, recall
from pipeline.gateway.api.responses.request import ResponseRequest
from pipeline.gateway.api.responses.stored import StoredResponse
from pipeline.gateway.context import GatewayContext
from pipeline.gateway.database import known_form
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.web import ApiRoute

_FORGET_S = 60.0  # from one look for what nobody has used for too long to the next
_RESPONSE = "/v1/responses/{response_id}"


class InputItemsQuery(BaseModel):
    """Query of GET /v1/responses/{id}/input_items."""

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ResponseEndpoints(GeneratingEndpoints):
    """Responses."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context)
        self._stored = context.stored_responses
        self._forgetting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._forgetting = asyncio.create_task(self._forget_old())

    async def aclose(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._stored.close()

    @ApiRoute(
        "POST", "/v1/responses", "Answer the next turn of a conversation.", request=ResponseRequest, direct=True
    )  # fmt: skip
    async def _create(self, request: Request) -> Response:
        stored = _RequestStorage(self.context)
        return await self.generate(
            request, ResponseRequest, stored.response, prompt_field="input", recall=stored.recall
        )

    @ApiRoute(
        "POST", "/v1/responses/input_tokens", "Count the tokens that a response would read.",
        request=ResponseRequest,
    )  # fmt: skip
    async def _count(self, request: Request) -> Response:
        stored = _RequestStorage(self.context)
        response = await self.check(
            request, ResponseRequest, stored.response, prompt_field="input", recall=stored.recall
        )
        tokens = response.generation.prompt_tokens
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    @ApiRoute("POST", "/v1/responses/compact", "Refused: no conversation is compacted here.")
    async def _compact(self, request: Request) -> Response:
        await self.context.authenticate(request)
        # A compaction item stands for a conversation that only the model which wrote it can read.
        text = (
            "Conversations are not compacted by this server: its models write no compaction items. truncation: auto "
            "leaves out the oldest turns of an input that is too long."
        )
        raise ApiError(400, text, code="compaction_not_supported")

    @ApiRoute("POST", f"{_RESPONSE}/cancel", "Refused: no response is made in the background.")
    async def _cancel(self, request: Request) -> Response:
        await self._find(request)
        text = "Cannot cancel a synchronous response: only those in the background can be, and there are none here."
        raise ApiError(400, text, code="response_not_cancellable")

    @ApiRoute("GET", _RESPONSE, "Return a response that is stored.")
    async def _show(self, request: Request) -> Response:
        _, stored = await self._find(request)
        if request.query_params.get("stream") == "true":
            text = "stream: only responses in the background can be streamed again, and there are none"
            raise unsupported("stream", text)
        return Response(stored.response, media_type="application/json")

    @ApiRoute("DELETE", _RESPONSE, "Forget a response.")
    async def _delete(self, request: Request) -> Response:
        tenant, _ = await self._find(request)
        id = request.path_params["response_id"]
        await self.context.use_state(self._stored.delete, tenant.name, id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    @ApiRoute("GET", f"{_RESPONSE}/input_items", "List the input of a response.", query=InputItemsQuery)
    async def _list_input(self, request: Request) -> Response:
        _, stored = await self._find(request)
        items: list[dict[str, Any]] = json.loads(stored.input)
        query = validate_request(InputItemsQuery, dict(request.query_params))
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == query.after]
            if not places:
                raise ApiError(400, "after: is not an item of this response", param="after")
            items = items[places[0] + 1 :]
        page = list_page(items[: query.limit], has_more=len(items) > query.limit)
        return JSONResponse({"object": "list", **page})

    async def _find(self, request: Request) -> tuple[Tenant, StoredResponse]:
        tenant, id = await self.context.authenticate(request), request.path_params["response_id"]
        responses = await self.context.use_state(self._stored.find, tenant.name, (known_form(id),))
        if id not in responses:
            raise ApiError(404, f"Response with id '{id[:64]}' not found.", code="response_not_found")
        return tenant, responses[id]

    async def _forget_old(self) -> None:
        while True:
            await asyncio.sleep(_FORGET_S)
            # The log says it; what is too old is not found in any case.
            with suppress(ApiError):
                await self.context.use_state(self._stored.forget_old)


class _RequestStorage:
    """Stored responses as one request reads and writes them."""

    def __init__(self, context: GatewayContext) -> None:
        self._context, self._stored = context, context.stored_responses
        self._recalled = RecalledResponses()

    async def recall(self, body: ResponseRequest, tenant: Tenant) -> int:
        """Read what a body continues and refers to; returns its bytes of JSON."""
        if body.previous_response_id is not None or body.referred_items:
            self._recalled = await self._context.use_state(
                recall, body, tenant.name, self._stored, self._context.max_body_bytes
            )
        return self._recalled.size

    def response(self, body: ResponseRequest, context: AnswerContext) -> ModelResponse:
        """Make the response to a body."""

        async def store(id: str, response: StoredResponse) -> bool:
            try:
                return await self._context.use_state(self._stored.put, context.tenant.name, id, response)
            except ApiError:
                return False

        return ModelResponse(body, context, self._recalled, store if self._stored.enabled else None)
