"""Endpoints of the gateway itself: its page, metrics, health, reports of wrong answers, and the description of the API.

The description is for programs (/openapi.json, OpenAPI 3.1) and for people (/docs), made from `ApiRoute`s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pipeline import __version__
from pipeline.gateway.api.parsing import parse_request
from pipeline.gateway.context import EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.readiness import readiness_page
from pipeline.gateway.web import ApiRoute, json_answer, own_page

_log = logging.getLogger("pipeline.gateway")
_PAGE = (resources.files("pipeline.gateway") / "page.html").read_text("utf-8")


class OperationEndpoints(EndpointFamily):
    """The page to chat at, metrics, health."""

    @ApiRoute("GET", "/", "The page to chat at.", logged=False, media_type="text/html")
    async def _page(self, _: Request) -> Response:
        return own_page(_PAGE)

    @ApiRoute("GET", "/metrics", "Metrics for Prometheus.", logged=False, media_type="text/plain")
    async def _metrics(self, request: Request) -> Response:
        """Render the metrics. Only a key that may read them sees tenants by name; an unknown key is refused."""
        tenants = self.context.tenants
        named = not tenants.require_keys
        if tenants.require_keys and tenants.has_key(request.headers):
            named = tenants.authenticate(request.headers).reads_metrics
        await asyncio.to_thread(self._count_marks)
        status, usage = await asyncio.gather(
            self.context.status(), asyncio.to_thread(self.context.kv_cache_usage)
        )
        page, content_type = self.context.metrics.render(
            request.headers.get("accept", ""), status, usage, names_tenants=named
        )
        return Response(page, headers={"content-type": content_type})

    def _count_marks(self) -> None:
        """Count the answers that `pipeline cache review` marked as wrong, before the metrics are read."""
        for model in self.context.models.values():
            if model.cache is not None:
                model.cache.count_marks()

    @ApiRoute("GET", "/healthz", "200 while the gateway itself runs.", logged=False, media_type="text/plain")
    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    @ApiRoute("GET", "/health", "200 while any model can be asked, else 503.", logged=False, media_type="")
    async def _health(self, request: Request) -> Response:
        """Answer as vLLM does: a status without a body."""
        return Response(status_code=(await self._ready(request)).status_code)

    @ApiRoute("GET", "/version", "The version of the gateway.", logged=False)
    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    @ApiRoute("GET", "/readyz", "200 while any model can be asked.", logged=False)
    async def _ready(self, _: Request) -> Response:
        """Answer 200 if any model can be asked, with faults of the others, and the package of each model."""
        status = await self.context.status()
        return JSONResponse(*readiness_page(status.models, draining=self.context.draining))


class FalseHitRequest(BaseModel):
    """Body of POST /v1/cache/false_hits."""

    model_config = ConfigDict(extra="forbid")
    request_id: str = Field(min_length=1, max_length=64)


class FalseHitAnswer(BaseModel):
    """Answer to POST /v1/cache/false_hits: how many entries were removed."""

    object: Literal["cache.false_hit"] = "cache.false_hit"
    request_id: str
    model: str
    removed: int


class FalseHitEndpoints(EndpointFamily):
    """Reports of clients that an answer of the response cache was wrong.

        curl localhost:8080/v1/cache/false_hits -H 'Content-Type: application/json' -d '{"request_id": "…"}'

    The id is the answer's `X-Request-ID`. The entry that answered is removed, so that the question is answered by the
    model the next time, and the report is counted (`pipeline_cache_events_total`, event `false_hit_reported`). A tenant
    can only report what was answered to its own requests.
    """

    @ApiRoute(
        "POST", "/v1/cache/false_hits", "Report that an answer of the cache was wrong.",
        request=FalseHitRequest, response=FalseHitAnswer,
    )  # fmt: skip
    async def _report(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        report = parse_request(FalseHitRequest, await self.context.receive_body(request))
        request_id = report.request_id
        hit = await self.context.hits.take(tenant.name, request_id)
        model = None if hit is None else self.context.models.get(hit.model)
        if hit is None or model is None or model.cache is None:
            text = f"No request {request_id!r} of yours was answered by the cache lately"
            raise ApiError(404, text, param="request_id", code="cache_hit_not_found")
        keys = [bytes.fromhex(key) for key in hit.keys]
        removed = await asyncio.to_thread(model.cache.report_false_hit, keys)
        _log.warning("a wrong answer of the cache of %s was reported: request %s", hit.model, request_id)
        return json_answer(FalseHitAnswer(request_id=request_id, model=hit.model, removed=removed))


_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_REFERENCE = "#/components/schemas/"


class ErrorDetail(BaseModel):
    """Error of an answer; Anthropic's have no `param` and `code`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = None


class ErrorAnswer(BaseModel):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail


class DescriptionEndpoints(EndpointFamily):
    """The description of the API."""

    @ApiRoute("GET", "/openapi.json", "The API, as OpenAPI 3.1.", logged=False)
    async def _openapi(self, _: Request) -> Response:
        description, _page = await self._rendered()
        return Response(description, media_type="application/json")

    @ApiRoute("GET", "/docs", "The API, as a page.", logged=False, media_type="text/html")
    async def _docs(self, _: Request) -> Response:
        _description, page = await self._rendered()
        return own_page(page)

    async def _rendered(self) -> tuple[str, str]:
        # In a thread, so that streams go on meanwhile; once, as long as the models have the same names.
        return await asyncio.to_thread(_render, self.context.routes, tuple(self.context.model_names()))


@lru_cache(maxsize=4)
def _render(routes: tuple[ApiRoute, ...], models: tuple[str, ...]) -> tuple[str, str]:
    """Render the description as JSON, and as a page."""
    api = describe_api(routes, models)
    text = (resources.files("pipeline.gateway") / "docs.html").read_text("utf-8")
    return json.dumps(api), Environment(autoescape=True).from_string(text).render(api=api)


def describe_api(routes: Sequence[ApiRoute], models: Sequence[str]) -> dict[str, Any]:
    """Describe routes, in their order, by OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0).

    Args:
        models: names that requests may have.
    """
    used = {
        kind for route in routes for kind in (route.request, route.form, route.response) if kind is not None
    }
    kinds = sorted(used | {ErrorAnswer}, key=lambda kind: kind.__name__)
    references, document = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=f"{_REFERENCE}{{model}}"
    )
    of = {kind: references[kind, "validation"] for kind in kinds}
    schemas: dict[str, Any] = document["$defs"]
    for route in routes:
        if route.request is not None and "model" in route.request.model_fields:
            model = schemas[of[route.request]["$ref"].removeprefix(_REFERENCE)]["properties"]["model"]
            (model.get("anyOf") or [model])[0]["enum"] = list(models)
        if route.form is not None:
            form = schemas[of[route.form]["$ref"].removeprefix(_REFERENCE)]
            form["properties"]["file"] = {"type": "string", "contentMediaType": "application/octet-stream"}
            form.setdefault("required", []).append("file")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(
            route, of
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "pipeline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                **{
                    name: {"type": "apiKey", "in": "header", "name": name}
                    for name in ("api-key", "x-api-key")
                },
            },
        },
        # One of them, where the gateway was started with keys.
        "security": [{}, {"bearer": []}, {"api-key": []}, {"x-api-key": []}],
    }


def _operation(route: ApiRoute, of: Mapping[type[BaseModel], Mapping[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": "_".join(
            [route.method.lower(), *re.findall(r"\w+", _PARAMETER.sub(r"\1", route.path))]
        ),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    if route.query is not None:
        schema = route.query.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": value}
            for name, value in schema["properties"].items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": of[route.request]}},
        }
    if route.form is not None:
        # Objects in a form are sent as OpenAI's clients do: expires_after[seconds]=3600.
        encoding = {"expires_after": {"style": "deepObject", "explode": True}}
        form = {"schema": of[route.form], "encoding": encoding}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": form}}
    done: dict[str, Any] = {"description": "Done."}
    if route.media_type:
        done["content"] = {route.media_type: {"schema": {} if route.response is None else of[route.response]}}
        if route.request is not None and "stream" in route.request.model_fields:
            done["content"]["text/event-stream"] = {}
    refused: dict[str, Any] = {"description": "Refused, or failed."}
    if route.logged:
        refused["content"] = {"application/json": {"schema": of[ErrorAnswer]}}
    operation["responses"] = {"200": done, "default": refused}
    return operation
