"""GET /v1/models: the models that requests may name, as OpenAI's objects, or as Anthropic's for its clients.

Anthropic's are written against anthropic-python 2.14 (`types.model_info`, `pagination.SyncPage`), for requests with the
header `anthropic-version`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.gateway.api.parsing import validate_request
from pipeline.gateway.context import EndpointFamily
from pipeline.gateway.errors import ApiError, is_anthropic
from pipeline.gateway.served_model import ServedModel, embedding_model_name
from pipeline.gateway.web import ApiRoute


class ModelObject(BaseModel):
    """A model, its alias, or its LoRA adapter; `root` is the model's own name, `parent` the adapter's base."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """Answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelObject]


class ModelEndpoints(EndpointFamily):
    """The list of models, and each of them."""

    @ApiRoute(
        "GET",
        "/v1/models",
        "List the models; with the header anthropic-version, as Anthropic's API does.",
        response=ModelList,
    )
    async def _list(self, request: Request) -> Response:
        self.context.tenants.authenticate(request.headers)
        if is_anthropic(request.scope):
            query = validate_request(AnthropicPageQuery, dict(request.query_params))
            models = self.context.models.values()
            infos = {name: model_info(name, model) for model in models for name in model.names}
            return JSONResponse(page(list(infos.values()), query))
        return JSONResponse({"object": "list", "data": list(self._descriptions().values())})

    @ApiRoute("GET", "/v1/models/{name:path}", "Describe a model.", response=ModelObject)
    async def _show(self, request: Request) -> Response:
        self.context.tenants.authenticate(request.headers)
        name, descriptions = request.path_params["name"], self._descriptions()
        if is_anthropic(request.scope):
            return JSONResponse(model_info(name, self.context.find_model(name)))
        if name not in descriptions:
            self.context.find_model(name)
        return JSONResponse(descriptions[name])

    def _descriptions(self) -> dict[str, dict[str, Any]]:
        """OpenAI's object of each model, by name; encoders come after all models."""
        models = self.context.models.values()
        descriptions: dict[str, dict[str, Any]] = {}
        for model in models:
            length = model.prompt_limit.max_tokens + model.max_output_tokens
            for name in model.names:
                parent = model.name if model.adapter_of(name) else None
                descriptions.setdefault(name, _describe(name, model.name, model.created, length, parent))
        for model in models:
            if model.embedder is not None:
                name = embedding_model_name(model.embedder)
                descriptions.setdefault(name, _describe(name, name, model.created, model.embedder.max_tokens))
        return descriptions


def _describe(name: str, root: str, created: int, length: int, parent: str | None = None) -> dict[str, Any]:
    """As vLLM's: `root` is the model's own name, also of an alias."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "pipeline", "root": root, "parent": parent,
        "max_model_len": length,
    }  # fmt: skip


class AnthropicPageQuery(BaseModel):
    """Query of a list of Anthropic's API."""

    after_id: str | None = None
    before_id: str | None = None
    limit: int = Field(default=20, ge=1, le=1000)


def model_info(name: str, model: ServedModel) -> dict[str, Any]:
    """Return Anthropic's object of a model, by its own name or an alias."""
    return {
        "type": "model", "id": name, "display_name": model.name, "created_at": rfc3339(model.created),
        "lifecycle": "active", "deprecated_at": None, "retires_at": None, "line": None, "capabilities": None,
        "max_input_tokens": model.prompt_limit.max_tokens, "max_tokens": model.max_output_tokens,
    }  # fmt: skip


def page(items: Sequence[dict[str, Any]], query: AnthropicPageQuery) -> dict[str, Any]:
    """Return the page of a list of objects that a query wants. Raises `ApiError` (400) for an id of none of them."""
    ids = [item["id"] for item in items]
    for name, id in (("after_id", query.after_id), ("before_id", query.before_id)):
        if id is not None and id not in ids:
            raise ApiError(400, f"{name}: {id[:64]!r} is not in this list", param=name)
    first = 0 if query.after_id is None else ids.index(query.after_id) + 1
    end = len(items) if query.before_id is None else ids.index(query.before_id)
    if query.after_id is None and query.before_id is not None:
        # The page that ends before the item.
        shown, has_more = items[max(0, end - query.limit) : end], end > query.limit
    else:
        shown, has_more = items[first:end][: query.limit], end - first > query.limit
    return list_page(shown, has_more=has_more)


def list_page(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of a list, as both vendors write it."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": list(data), "has_more": has_more, "first_id": first, "last_id": last}


def rfc3339(seconds: float) -> str:
    """Write seconds since the epoch as Anthropic writes times.

    >>> rfc3339(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")
