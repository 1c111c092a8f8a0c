"""The ASGI application of a gateway: families of endpoints with the middleware around them, and its HTTP server.

Most families are in `pipeline.gateway.api`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from socket import socket

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pipeline.gateway.access_log import AccessLog, log_request
from pipeline.gateway.api.batches.endpoints import BatchEndpoints, FileEndpoints
from pipeline.gateway.api.batches.message_batches import MessageBatchEndpoints
from pipeline.gateway.api.bounds import MAX_BODY_BYTES
from pipeline.gateway.api.chat import CompletionEndpoints
from pipeline.gateway.api.embeddings import EmbeddingEndpoints
from pipeline.gateway.api.messages import MessageEndpoints
from pipeline.gateway.api.models import ModelEndpoints
from pipeline.gateway.api.responses.endpoints import ResponseEndpoints
from pipeline.gateway.api.tokenization import TokenizationEndpoints
from pipeline.gateway.client_connection import ConnectionLimits
from pipeline.gateway.context import EndpointFamily, GatewayContext, GatewayParts
from pipeline.gateway.errors import ApiError, error_response, internal_error
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.http_server import HttpServer
from pipeline.gateway.metrics import GatewayMetrics
from pipeline.gateway.operations import DescriptionEndpoints, FalseHitEndpoints, OperationEndpoints
from pipeline.gateway.readiness import ModelStatus
from pipeline.gateway.redis_losses import RedisLosses
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.web import (
    AllowedHosts,
    DirectRoutes,
    RouteTable,
    WebGuard,
    with_azure_paths,
    with_cors,
)

# Characters of an unknown path that are compared with known ones.
_LONGEST_PATH = 100

# In the order in which they are matched, and described at /openapi.json.
_FAMILIES: Sequence[type[EndpointFamily]] = (
    CompletionEndpoints,
    ResponseEndpoints,
    MessageEndpoints,
    MessageBatchEndpoints,
    EmbeddingEndpoints,
    TokenizationEndpoints,
    ModelEndpoints,
    FalseHitEndpoints,
    FileEndpoints,
    BatchEndpoints,
    OperationEndpoints,
    DescriptionEndpoints,
)


class Gateway:
    """All models behind one ASGI application, `app`."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        tenants: Tenants,
        settings: GatewaySettings = GatewaySettings(),
        parts: GatewayParts = GatewayParts(),
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """`models`: name -> model; those of `parts.worker`, if there is a worker, are shared already."""
        self.models, worker, origins = dict(models), parts.worker, settings.allowed_origins
        self.metrics = GatewayMetrics(
            self.models,
            names=settings.metric_names,
            restarts=lambda: {follower.name: follower.restarts for follower in parts.followers},
            shared=None if worker is None else worker.place.metrics,
        )
        self.context = GatewayContext(
            self.models, tenants, self.metrics, parts, max_body_bytes=max_body_bytes
        )
        self._buckets = buckets = parts.buckets
        # The parent of several workers counts losses for all of them.
        self._losses = None if buckets is None or worker is not None else RedisLosses(buckets.address)
        if buckets is not None:
            buckets.on_fallback = self.metrics.count_limits_fallback
            for tenant in tenants.limited:
                tenant.shared = buckets
        self._tracer = parts.tracer
        self._families = [family(self.context) for family in _FAMILIES]
        table = RouteTable(route for family in self._families for route in family.endpoints())
        self.context.routes = table.all
        application = Starlette(
            routes=table.starlette,
            lifespan=self._lifespan,
            exception_handlers={
                ApiError: _answer_error,
                HTTPException: _answer_http_exception,
                404: _not_found,
                405: _not_found,
                500: _internal_error,
            },
        )
        direct = DirectRoutes(table.direct, application)
        guarded = WebGuard(
            direct, AllowedHosts(settings.host, settings.allowed_hosts), origins,
            keys=tenants.require_keys, forms=table.forms,
        )  # fmt: skip

        def logged(app: ASGIApp) -> ASGIApp:
            return AccessLog(app, self._tracer, self.metrics, table, prompt_log=parts.prompt_log)

        self.app = with_azure_paths(logged(with_cors(guarded, origins)))
        self.context.application = logged(direct)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        context = self.context
        if context.worker is not None:
            await context.worker.connect(self._report)
        for model in self.models.values():
            if self._losses is not None and isinstance(model.queue, FairQueue):
                model.queue.lost_servers.share(self._losses)
            model.start()
        following = [
            asyncio.create_task(follower.run(self.models)) for follower in context.followers.values()
        ]
        for family in self._families:
            await family.start()
        yield
        for family in self._families:
            await family.aclose()
        for task in following:
            task.cancel()
        for follower in context.followers.values():
            await follower.aclose()
        for model in self.models.values():
            await model.aclose()
        context.close()
        await asyncio.to_thread(self._tracer.close)
        if self._buckets is not None:
            await self._buckets.aclose()
        if self._losses is not None:
            await self._losses.aclose()
        if context.worker is not None:
            await context.worker.aclose()

    def _report(self) -> dict[str, ModelStatus]:
        """Make the report for the parent of the workers, about twice a second."""
        self.metrics.count_elsewhere()
        return self.context.model_status()


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer a request that Starlette itself refuses: a form that cannot be parsed."""
    assert isinstance(error, HTTPException)
    return error_response(request.scope, ApiError(error.status_code, error.detail))


async def _internal_error(request: Request, _: Exception) -> Response:
    """Answer a fault of ours. The exception goes on to the access log, which has the request's id and its record."""
    return internal_error().response(request.scope)


async def _not_found(request: Request, _: Exception) -> Response:
    path = request.url.path
    text = f"Unknown request URL: {request.method} {path}"
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    paths = {route.path for route in routes}
    methods = {name for route in routes if route.path == path for name in route.methods or ()}
    near = [f"/v1{path}"] if f"/v1{path}" in paths else get_close_matches(path[:_LONGEST_PATH], paths, n=1)
    if methods:
        text += f"; this path takes {', '.join(sorted(methods - {'HEAD'}))}"
    elif near:
        text += f"; did you mean {near[0]}?"
    return error_response(request.scope, ApiError(404, text, code="unknown_url"))


class GatewayServer(HttpServer):
    """Server of a gateway.

    On SIGTERM and Ctrl-C it stops listening, and completes the requests that are under way; those that take longer than
    `drain_s` are broken off, so that clients see that the answer is not complete.
    """

    def __init__(
        self,
        gateway: Gateway,
        host: str,
        port: int,
        *,
        limits: ConnectionLimits | None = None,
        drain_s: int = 30,
    ) -> None:
        super().__init__(gateway.app, host, port, self._note_refusal, limits=limits, drain_s=drain_s)
        self._gateway = gateway
        self.on_start: Callable[[], None] = lambda: None  # called when it listens

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        # Templates, tokenizers and modules stay. Each time the collector looks through them, all streams halt.
        gc.freeze()
        if self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._gateway.context.draining = True
        await super().shutdown(sockets)

    def _note_refusal(self, error: ApiError) -> None:
        self._gateway.metrics.count_request("other", "", error.status)
        ended = {"status": error.status, "outcome": error.status}
        log_request(logging.INFO, {**ended, "error": error.message, "error_type": error.code})
