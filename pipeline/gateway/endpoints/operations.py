"""What people and probes ask of the gateway itself: the page to chat at, metrics, health."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pipeline import __version__
from pipeline.gateway.endpoints.endpoint import EndpointFamily
from pipeline.gateway.model_status import readiness_page
from pipeline.gateway.routes import ApiRoute
from pipeline.gateway.web import own_page


class OperationEndpoints(EndpointFamily):
    """The page to chat at, metrics, health."""

    @ApiRoute("GET", "/", "The page to chat at.", logged=False, media_type="text/html")
    async def _page(self, _: Request) -> Response:
        return own_page(_chat_page())

    @ApiRoute("GET", "/metrics", "Metrics for Prometheus.", logged=False, media_type="text/plain")
    async def _metrics(self, request: Request) -> Response:
        """Without a key, or by one that may not read them, no tenant is named. A key that is not known is refused."""
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
        """What `pipeline cache review` marked as wrong, before the metrics are read."""
        for model in self.context.models.values():
            if model.cache is not None:
                model.cache.count_marks()

    @ApiRoute("GET", "/healthz", "200 while the gateway itself runs.", logged=False, media_type="text/plain")
    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    @ApiRoute("GET", "/health", "200 while any model can be asked, else 503.", logged=False, media_type="")
    async def _health(self, request: Request) -> Response:
        """As vLLM's: a status without a body."""
        return Response(status_code=(await self._ready(request)).status_code)

    @ApiRoute("GET", "/version", "The version of the gateway.", logged=False)
    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    @ApiRoute("GET", "/readyz", "200 while any model can be asked.", logged=False)
    async def _ready(self, _: Request) -> Response:
        """200 if any model can be asked, with what is wrong with the others, and which package each model is of."""
        status = await self.context.status()
        return JSONResponse(*readiness_page(status.models, draining=self.context.draining))


@cache
def _chat_page() -> str:
    return (resources.files("pipeline.gateway") / "page.html").read_text("utf-8")
