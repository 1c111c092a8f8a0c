"""POST /v1/cache/false_hits: a client says that an answer which the response cache gave was wrong.

    curl localhost:8080/v1/cache/false_hits -H 'Content-Type: application/json' -d '{"request_id": "…"}'

The id is the answer's `X-Request-ID`. The entry that answered is removed, so that the question is answered by the model
the next time, and the report is counted (`pipeline_cache_events_total`, event `false_hit_reported`). A tenant can only
report what was answered to its own requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pipeline.gateway.api.parsing import parse_request
from pipeline.gateway.context import EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.routes import ApiRoute, json_answer

_log = logging.getLogger("pipeline.gateway")


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
    """Reports of wrong answers."""

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
