"""GET /v1/models: the models that requests may name, as OpenAI's objects, or as Anthropic's for its clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.gateway.anthropic_models import AnthropicPageQuery, model_info, page
from pipeline.gateway.endpoints.answers import ModelList, ModelObject
from pipeline.gateway.endpoints.endpoint import ApiEndpoint, EndpointFamily
from pipeline.gateway.errors import is_anthropic
from pipeline.gateway.parsing import validate_request
from pipeline.gateway.served_model import embedding_model_name


class ModelEndpoints(EndpointFamily):
    """The list of models, and each of them."""

    def endpoints(self) -> Sequence[ApiEndpoint]:
        return (
            ApiEndpoint(
                "GET",
                "/v1/models",
                self._list,
                "List the models; with the header anthropic-version, as Anthropic's API does.",
                response=ModelList,
            ),
            ApiEndpoint(
                "GET", "/v1/models/{name:path}", self._show, "Describe a model.", response=ModelObject
            ),
        )

    async def _list(self, request: Request) -> Response:
        self.context.tenants.authenticate(request.headers)
        if is_anthropic(request.scope):
            query = validate_request(AnthropicPageQuery, dict(request.query_params))
            models = self.context.models.values()
            infos = {name: model_info(name, model) for model in models for name in model.names}
            return JSONResponse(page(list(infos.values()), query))
        return JSONResponse({"object": "list", "data": list(self._descriptions().values())})

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
        found: dict[str, dict[str, Any]] = {}
        for model in models:
            length = model.prompt_limit.max_tokens + model.max_output_tokens
            for name in model.names:
                found.setdefault(name, _describe(name, model.name, model.created, length))
        for model in models:
            if model.embedder is not None:
                name = embedding_model_name(model.embedder)
                found.setdefault(name, _describe(name, name, model.created, model.embedder.max_tokens))
        return found


def _describe(name: str, root: str, created: int, length: int) -> dict[str, Any]:
    """As vLLM's: `root` is the model's own name, also of an alias."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "pipeline", "root": root, "max_model_len": length
    }  # fmt: skip
