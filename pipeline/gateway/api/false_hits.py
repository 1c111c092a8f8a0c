"""POST /v1/cache/false_hits: a client says that an answer which the response cache gave was wrong.

    curl localhost:8080/v1/cache/false_hits -H 'Content-Type: application/json' -d '{"request_id": "…"}'

The id is the answer's `X-Request-ID`. The entry that answered is removed, so that the question is answered by the model
the next time, and the report is counted (`pipeline_cache_events_total`, event `false_hit_reported`). A tenant can only
report what was answered to its own requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.gateway.api.answer_schemas import FalseHitAnswer
from pipeline.gateway.api.parsing import parse_request
from pipeline.gateway.endpoints.endpoint import ApiEndpoint, EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.served_model import ServedModel

_log = logging.getLogger("pipeline.gateway")
_REMEMBERED = 10_000  # requests


class FalseHitRequest(BaseModel):
    """Body of POST /v1/cache/false_hits."""

    model_config = ConfigDict(extra="forbid")
    request_id: str = Field(min_length=1, max_length=64)


class CacheHit(NamedTuple):
    """Entries of a model's cache that answered one request."""

    model: str
    keys: Sequence[str]


class CacheHits:
    """The last requests that the cache answered, by tenant and id."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        """
        Args:
            most: how many requests are remembered; the oldest are forgotten first.
        """
        self._most = most
        self._hits: OrderedDict[tuple[str, str], CacheHit] = OrderedDict()

    def remember(self, tenant: str, request_id: str, hit: CacheHit) -> None:
        """Note that a request was answered by the cache.

        Args:
            tenant: name of the tenant.
            request_id: of the request.
            hit: what answered it.
        """
        self._hits[tenant, request_id] = hit
        while len(self._hits) > self._most:
            self._hits.popitem(last=False)

    async def take(self, tenant: str, request_id: str) -> CacheHit | None:
        """Return what answered a request, and forget it; None if nothing is known of it."""
        return self._hits.pop((tenant, request_id), None)

    async def report(self, tenant: str, request_id: str, models: Mapping[str, ServedModel]) -> dict[str, Any]:
        """Remove what answered a request, and count the report.

        Args:
            tenant: name of the tenant that reports it.
            request_id: of the request that was answered wrongly.
            models: of the gateway, by name.

        Returns:
            The body of the response.

        Raises:
            ApiError: 404, if the cache answered no such request of the tenant, or too long ago.
        """
        hit = await self.take(tenant, request_id)
        model = None if hit is None else models.get(hit.model)
        if hit is None or model is None or model.cache is None:
            text = f"No request {request_id!r} of yours was answered by the cache lately"
            raise ApiError(404, text, param="request_id", code="cache_hit_not_found")
        keys = [bytes.fromhex(key) for key in hit.keys]
        removed = await asyncio.to_thread(model.cache.report_false_hit, keys)
        _log.warning("a wrong answer of the cache of %s was reported: request %s", hit.model, request_id)
        return {
            "object": "cache.false_hit", "request_id": request_id, "model": hit.model, "removed": removed
        }  # fmt: skip


class FalseHitEndpoints(EndpointFamily):
    """Reports of wrong answers."""

    def endpoints(self) -> Sequence[ApiEndpoint]:
        return (
            ApiEndpoint(
                "POST", "/v1/cache/false_hits", self._report, "Report that an answer of the cache was wrong.",
                request=FalseHitRequest, response=FalseHitAnswer,
            ),
        )  # fmt: skip

    async def _report(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        report = parse_request(FalseHitRequest, await self.context.receive_body(request))
        hits = self.context.hits
        return JSONResponse(await hits.report(tenant.name, report.request_id, self.context.models))
