"""The ASGI application of a gateway: families of endpoints, and the middleware around them.

What an endpoint does is in its family's module, in `pipeline.gateway.endpoints`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pipeline.gateway.access_log import AccessLog
from pipeline.gateway.api.batches.endpoints import BatchEndpoints, FileEndpoints
from pipeline.gateway.api.batches.message_batches import MessageBatchEndpoints
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.api.chat import CompletionEndpoints
from pipeline.gateway.api.embeddings import EmbeddingEndpoints
from pipeline.gateway.api.false_hits import FalseHitEndpoints
from pipeline.gateway.api.messages import MessageEndpoints
from pipeline.gateway.api.models import ModelEndpoints
from pipeline.gateway.api.responses.endpoints import ResponseEndpoints
from pipeline.gateway.api.responses.stored import (
    SqlStoredResponses,
    StoredResponseLimits,
    StoredResponses,
)
from pipeline.gateway.api.tokenization import TokenizationEndpoints
from pipeline.gateway.bounds import MAX_BODY_BYTES
from pipeline.gateway.context import GatewayContext
from pipeline.gateway.endpoints.description import DescriptionEndpoints
from pipeline.gateway.endpoints.endpoint import EndpointFamily
from pipeline.gateway.endpoints.operations import OperationEndpoints
from pipeline.gateway.errors import ApiError, error_response, internal_error
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.metric_names import MetricNames
from pipeline.gateway.metrics import GatewayMetrics, Restarts
from pipeline.gateway.model_status import ModelStatus
from pipeline.gateway.prompt_log import PromptLog
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.redis_limits import RedisBuckets
from pipeline.gateway.redis_losses import RedisLosses
from pipeline.gateway.routes import DirectRoutes, RouteTable
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.traces import LocalTracer, Tracer
from pipeline.gateway.web import FORM, JSON, AllowedHosts, WebGuard, with_azure_paths, with_cors
from pipeline.gateway.workers.worker import GatewayWorker

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
        *,
        hosts: AllowedHosts | None = None,
        origins: Sequence[str] = (),
        max_body_bytes: int = MAX_BODY_BYTES,
        tracer: Tracer | None = None,
        prompt_log: PromptLog | None = None,
        metric_names: Sequence[MetricNames] = (),
        restarts: Restarts = dict,
        kv_cache_usage: Callable[[], Mapping[str, float]] = dict,
        followers: Sequence[RecordFollower] = (),
        batches: BatchStorage | None = None,
        worker: GatewayWorker | None = None,
        stored_responses: StoredResponses | None = None,
        buckets: RedisBuckets | None = None,
    ) -> None:
        """
        Args:
            models: name -> model.
            tenants: who may ask.
            hosts: that requests may name; by default those of loopback.
            origins: other web pages that may ask.
            max_body_bytes: largest body of a request.
            tracer: exports spans; by default none are.
            prompt_log: what of prompts and answers goes into the log; by default nothing.
            metric_names: whose names the metrics are shown under besides the gateway's own.
            restarts: reads how often what serves each model was restarted.
            kv_cache_usage: reads the share of each engine's KV cache that is used; called in a thread.
            followers: replace models when another package is served, or at another address.
            batches: keeps files and batches; by default they are refused.
            worker: the parent of this process, if it is one of several; models are those that it has shared.
            stored_responses: keeps responses for /v1/responses; by default the memory of this process.
            buckets: in which limits are shared with other gateways, and beside which losses of servers are; None: each
                gateway has its own.
        """
        self.models = dict(models)
        shared = None if worker is None else worker.place.metrics
        self.metrics = GatewayMetrics(self.models, names=metric_names, restarts=restarts, shared=shared)
        self.context = GatewayContext(
            self.models,
            tenants,
            self.metrics,
            max_body_bytes=max_body_bytes,
            kv_cache_usage=kv_cache_usage,
            followers=followers,
            batches=batches,
            worker=worker,
            stored_responses=stored_responses or SqlStoredResponses.of_gateway(StoredResponseLimits()),
        )
        self._buckets = buckets
        # The parent of several workers counts losses for all of them.
        self._losses = None if buckets is None or worker is not None else RedisLosses(buckets.address)
        if buckets is not None:
            buckets.on_fallback = self.metrics.count_limits_fallback
            tenants.share_buckets(buckets)
        self._tracer = tracer or LocalTracer()
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
            direct, hosts or AllowedHosts(), origins,
            keys=tenants.require_keys, content_types=lambda path: (FORM if path in table.forms else JSON,),
        )  # fmt: skip

        def logged(app: ASGIApp) -> ASGIApp:
            return AccessLog(app, self._tracer, self.metrics, table, prompt_log=prompt_log)

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
        following = [asyncio.create_task(one.run(self.models)) for one in context.followers.values()]
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
        """What this process tells the parent of the workers, about twice a second."""
        self.metrics.count_elsewhere()
        return self.context.model_status()


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: a form that cannot be parsed."""
    assert isinstance(error, HTTPException)
    return error_response(request.scope, ApiError(error.status_code, error.detail))


async def _internal_error(request: Request, _: Exception) -> Response:
    """The exception goes on to the access log, which has the request's id, and its record."""
    return internal_error().response(request.scope)


async def _not_found(request: Request, _: Exception) -> Response:
    text = f"Unknown request URL: {request.method} {request.url.path}"
    return error_response(request.scope, ApiError(404, text, code="unknown_url"))
