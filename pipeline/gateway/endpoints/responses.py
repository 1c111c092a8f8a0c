"""OpenAI's Responses API: POST /v1/responses, and what is kept of the responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.gateway.context import GatewayContext
from pipeline.gateway.endpoints.endpoint import ApiEndpoint
from pipeline.gateway.endpoints.generating import Asker, GeneratingEndpoints
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.parsing import validate_request
from pipeline.gateway.responses.model_response import ModelResponse
from pipeline.gateway.responses.request import ResponseRequest
from pipeline.gateway.responses.stored_responses import StoredResponse, StoredResponses


class InputItemsQuery(BaseModel):
    """Query of GET /v1/responses/{id}/input_items."""

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ResponseEndpoints(GeneratingEndpoints):
    """Responses."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context)
        worker = context.worker
        # The parent removes the folder when all have ended.
        file = None if worker is None else worker.place.metrics / "responses.sqlite"
        self._memory = StoredResponses(context.stored_responses, file)

    def endpoints(self) -> Sequence[ApiEndpoint]:
        one = "/v1/responses/{response_id}"
        return (
            ApiEndpoint(
                "POST", "/v1/responses", self._create, "Answer the next turn of a conversation.",
                request=ResponseRequest, direct=True,
            ),
            ApiEndpoint(
                "POST", "/v1/responses/input_tokens", self._count, "Count the tokens that a response would read.",
                request=ResponseRequest,
            ),
            ApiEndpoint("GET", one, self._show, "Return a response that is remembered."),
            ApiEndpoint("DELETE", one, self._delete, "Forget a response."),
            ApiEndpoint(
                "GET", f"{one}/input_items", self._list_input, "List the input of a response.",
                query=InputItemsQuery,
            ),
        )  # fmt: skip

    async def aclose(self) -> None:
        self._memory.close()

    async def _create(self, request: Request) -> Response:
        return await self.generate(
            request,
            ResponseRequest,
            self._response,
            prompt_field="input",
            remembered_bytes=self._remembered_bytes,
        )

    async def _count(self, request: Request) -> Response:
        checked = await self.check(
            request,
            ResponseRequest,
            self._response,
            prompt_field="input",
            remembered_bytes=self._remembered_bytes,
        )
        tokens = checked.generation.prompt_tokens
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def _show(self, request: Request) -> Response:
        _, stored = await self._find(request)
        if request.query_params.get("stream") == "true":
            text = "stream: only responses in the background can be streamed again, and there are none"
            raise ApiError(400, text, param="stream", code="unsupported_parameter")
        return Response(stored.response, media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        tenant, _ = await self._find(request)
        id = request.path_params["response_id"]
        self._memory.delete(tenant.name, id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def _list_input(self, request: Request) -> Response:
        _, stored = await self._find(request)
        items: list[dict[str, Any]] = json.loads(stored.input)
        query = validate_request(InputItemsQuery, dict(request.query_params))
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == query.after]
            if not places:
                raise ApiError(400, "after: is no item of this response", param="after")
            items = items[places[0] + 1 :]
        listed = items[: query.limit]
        return JSONResponse(
            {
                "object": "list", "data": listed, "has_more": len(listed) < len(items),
                "first_id": listed[0]["id"] if listed else None, "last_id": listed[-1]["id"] if listed else None,
            }
        )  # fmt: skip

    def _response(self, body: ResponseRequest, asker: Asker) -> ModelResponse:
        return ModelResponse(
            body, asker.model, asker.tenant, asker.record.id, asker.record.span,
            memory=self._memory, most_bytes=self.context.max_body_bytes,
        )  # fmt: skip

    def _remembered_bytes(self, body: ResponseRequest, tenant: Tenant) -> int:
        previous = body.previous_response_id
        return 0 if previous is None else self._memory.size(tenant.name, previous)

    async def _find(self, request: Request) -> tuple[Tenant, StoredResponse]:
        tenant, id = await self.context.authenticate(request), request.path_params["response_id"]
        stored = self._memory.get(tenant.name, id)
        if stored is None:
            raise ApiError(404, f"Response with id '{id[:64]}' not found.", code="response_not_found")
        return tenant, stored
