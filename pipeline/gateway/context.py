"""Shared base of all endpoints of a gateway: models, tenants, metrics, and how a request is admitted and read.

Requests that take long to parse are parsed in threads, so that streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.api.responses.stored import SqlStoredResponses, StoredResponseLimits, StoredResponses
from pipeline.gateway.api.sse import cancel_on_disconnect
from pipeline.gateway.errors import ApiError
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.limits import Tenant
from pipeline.gateway.metrics import GatewayMetrics
from pipeline.gateway.readiness import GatewayStatus, ModelStatus
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.records import CacheHits, PromptLog, RequestRecord
from pipeline.gateway.served_model import ServedModel, embedding_model_name, model_not_found
from pipeline.gateway.shared_redis import RedisBuckets
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.text_processes import CpuMeter
from pipeline.gateway.traces import Tracer
from pipeline.gateway.web import ApiRoute, Handler, routes_of
from pipeline.gateway.workers.worker import GatewayWorker

# Up to this size (bytes of JSON) parsing a request and counting its tokens takes about a millisecond.
SMALL_BODY_BYTES = 8 * 1024

_MAX_ARRIVING_BYTES = 256 * 2**20  # of all bodies that are being received
# Largest request of each pool of threads, and most threads, since long texts take memory. There are several pools, so
# that no request waits for much longer requests.
_POOLS = ((64 * 1024, 16), (512 * 1024, 4), (sys.maxsize, 2))
_PARSED_BYTES_PER_S = 1e6  # about, by one thread
# What takes longer to read than this is charged to its tenant.
_READING_S, _SLOWLY_PARSED_BYTES_PER_S = 0.02, 0.4e6
_MAX_WAITING = 64  # requests for the threads of a pool
_STATE_THREADS = 16
_NO_BATCHES = (
    "Files and batches are refused: this is one of several gateways, and they have no place that all of them share. "
    "Name a PostgreSQL server in the recipe (cache.backend of kind pgvector), or a folder by gateway.batch_folder"
)
_Parsed = TypeVar("_Parsed")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """Parts of a gateway that are made outside it.

    Attributes:
        batches: storage of files and batches; None: there is no place for them that all gateways share, and they are
            refused.
        stored_responses: storage of responses for /v1/responses; None: the memory of this process.
        followers: replace models when another package is served, or at another address.
        kv_cache_usage: reads the share of each engine's KV cache that is used, by model; called in a thread.
        worker: the parent of this process, if it is one of several; None if it serves the gateway alone.
        tracer: exports spans.
        prompt_log: logs prompts and answers; None: neither is logged.
        buckets: limits shared with other gateways, beside which losses of servers are; None: this gateway has its own.
    """

    batches: BatchStorage | None = None
    stored_responses: StoredResponses | None = None
    followers: Sequence[RecordFollower] = ()
    kv_cache_usage: Callable[[], Mapping[str, float]] = dict
    worker: GatewayWorker | None = None
    tracer: Tracer = field(default_factory=Tracer)
    prompt_log: PromptLog | None = None
    buckets: RedisBuckets | None = None


class GatewayContext:
    """Models, tenants, metrics and storage that all endpoints of a gateway share.

    Attributes:
        routes: all routes; set when they are complete.
        application: answers requests without the guards against web pages: those of batches; set when it is complete.
        draining: whether the gateway is stopping, and takes nothing new.
        max_body_bytes: largest body of a request.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        tenants: Tenants,
        metrics: GatewayMetrics,
        parts: GatewayParts,
        *,
        max_body_bytes: int,
    ) -> None:
        self.models, self.tenants, self.metrics = models, tenants, metrics
        self.kv_cache_usage, self.batches, self.worker = parts.kv_cache_usage, parts.batches, parts.worker
        own = parts.stored_responses
        self.stored_responses = SqlStoredResponses.of_gateway(StoredResponseLimits()) if own is None else own
        self.followers = {follower.name: follower for follower in parts.followers}
        self.hits = CacheHits() if parts.worker is None else parts.worker.hits
        self.parsers = ParserThreads()
        self.state_threads = ThreadPoolExecutor(_STATE_THREADS, "state")
        self.routes: Sequence[ApiRoute] = ()
        self.application: ASGIApp = _not_ready
        self.draining = False
        self.max_body_bytes = max_body_bytes
        self._arriving_bytes = 0

    async def status(self) -> GatewayStatus:
        """Return the status of all models, over all workers of the gateway.

        Raises:
            ApiError: 503, if the parent of the workers does not answer.
        """
        return GatewayStatus(self.model_status()) if self.worker is None else await self.worker.status()

    def model_status(self) -> dict[str, ModelStatus]:
        """Return the status of each model in this process."""
        stalled = self.metrics.stalled()
        statuses = {}
        for name, model in self.models.items():
            follower = self.followers.get(name)
            statuses[name] = ModelStatus(
                deployment=model.deployment,
                endpoints=[endpoint.url for endpoint in model.client.endpoints],
                fault=model.readiness.fault,
                stale=None if follower is None else follower.fault,
                replaced_requests=0 if follower is None else follower.replaced_requests,
                running=model.queue.running,
                waiting=model.queue.waiting,
                stalled=stalled[name],
                loss_events=model.queue.loss_events,
            )
        return statuses

    async def authenticate(self, request: Request) -> Tenant:
        """Find the tenant of a request, and count the request.

        Raises:
            ApiError: 401 without a key that is known; 429, if the tenant's requests are used up; 503 while stopping.
        """
        if self.draining:
            raise ApiError(503, "The server is stopping; ask another one", code="draining", retry_after_s=1)
        # The gateway's own requests, those of batches, come with their tenant.
        tenant: Tenant = request.scope.get("tenant") or self.tenants.authenticate(request.headers)
        record: RequestRecord = request.scope["record"]
        record.fields["tenant"] = tenant.name
        record.rate_limits = tenant.rate_limit_headers
        await tenant.count_request()
        return tenant

    async def receive_body(self, request: Request) -> bytes:
        """Receive the whole body of a request.

        Raises:
            ApiError: 408, 413, 499 or 503, if it is late, too large, not complete, or one of too many.
        """
        body, more, counted = bytearray(), True, 0
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    text = "The client left before it had sent the whole body"
                    raise ApiError(499, text, code="client_left")
                if request.scope.get("late"):
                    raise ApiError(408, "The body did not come in time", code="request_timeout")
                body += message["body"]
                more = message["more_body"]
                if len(body) > self.max_body_bytes:
                    text = f"The body is larger than {self.max_body_bytes} bytes"
                    raise ApiError(413, text, code="body_too_large")
                if len(body) > SMALL_BODY_BYTES:
                    self._arriving_bytes += len(body) - counted
                    counted = len(body)
                    if self._arriving_bytes > _MAX_ARRIVING_BYTES:
                        text = "Too many large requests come at once"
                        raise ApiError(503, text, code="overloaded", retry_after_s=1)
            return bytes(body)
        finally:
            self._arriving_bytes -= counted

    @property
    def batch_storage(self) -> BatchStorage:
        """Storage of files and batches.

        Raises:
            ApiError: 501, if there is none.
        """
        if self.batches is None:
            raise ApiError(501, _NO_BATCHES, code="batches_not_configured")
        return self.batches

    async def use_state(
        self,
        call: Callable[_Parameters, _Result],
        *arguments: _Parameters.args,
        **named: _Parameters.kwargs,
    ) -> _Result:
        """Read or write files, batches or stored responses in threads of their own.

        A server of these that hangs then holds up nothing else.
        """
        run = partial(call, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self.state_threads, run)

    def close(self) -> None:
        """End the threads."""
        self.parsers.close()
        self.state_threads.shutdown(wait=False, cancel_futures=True)

    def find_model(self, name: str) -> ServedModel:
        """Return the model that a request names, by its own name or an alias, alone or with an adapter.

        Raises:
            ApiError: 404, if there is none.
        """
        model = self.models.get(name) or self._find_alias(name)
        if model is None:
            raise model_not_found(name, [own for model in self.models.values() for own in model.names])
        return model

    def own_name(self, name: str) -> str:
        """Return the name that a model has in log and metrics, where requests may name it by an alias."""
        model = self._find_alias(name)
        return name if name in self.models or model is None else model.name

    def model_names(self) -> list[str]:
        """Return all names that requests may have, those of encoders included."""
        models = self.models.values()
        embedders = [embedding_model_name(model.embedder) for model in models if model.embedder is not None]
        return [*(name for model in models for name in model.names), *embedders]

    def _find_alias(self, name: str) -> ServedModel | None:
        return next((model for model in self.models.values() if name in model.names), None)


async def _not_ready(*_: object) -> None:
    raise AssertionError("the gateway is not complete yet")


class EndpointFamily:
    """Endpoints that belong together, over what all endpoints of the gateway share."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context

    def endpoints(self) -> Sequence[tuple[ApiRoute, Handler]]:
        """Return the endpoints, in the order in which they are matched and described."""
        return routes_of(self)

    async def start(self) -> None:
        """Begin what goes on beside requests; called once, in the event loop that serves."""

    async def aclose(self) -> None:
        """End what `start` began; called once, when no request is under way any more."""


class ParserThreads:
    """Threads that parse, render and tokenize requests, so that streams go on meanwhile."""

    def __init__(self) -> None:
        self._charging: set[asyncio.Task[None]] = set()
        quarter = max(1, (os.cpu_count() or 1) // 4)
        self._pools = [
            (
                most_bytes,
                FairQueue(threads, max_waiting=_MAX_WAITING, s_per_token=1 / _PARSED_BYTES_PER_S),
                ThreadPoolExecutor(threads, "requests"),
            )
            for most_bytes, threads in ((most, min(quarter, threads)) for most, threads in _POOLS)
        ]

    async def run(self, parse: Callable[[], _Parsed], request: Request, size: int, tenant: Tenant) -> _Parsed:
        """Call `parse` in a thread. What it raises is raised here.

        Args:
            request: the client's; it may leave meanwhile.
            size: bytes of the body.
            tenant: the request's; tenants take turns.

        Raises:
            ApiError: 429, if too many requests wait for a thread, or those of the tenant took too long to read; 499, if
                the client leaves meanwhile.
        """
        _, queue, threads = next(pool for pool in self._pools if size <= pool[0])
        async with cancel_on_disconnect(request.receive), queue.slot(size, tenant.name):
            tenant.check_reading()
            meter, loop = CpuMeter(), asyncio.get_running_loop()
            reading = threads.submit(meter.run, parse)

            def charge() -> None:
                excess_s = meter.used_s - _READING_S - size / _SLOWLY_PARSED_BYTES_PER_S
                if excess_s > 0:
                    task = loop.create_task(tenant.charge_reading(excess_s))
                    self._charging.add(task)
                    task.add_done_callback(self._charging.discard)

            # Also if the client has left before.
            reading.add_done_callback(lambda _: loop.call_soon_threadsafe(charge))
            return await asyncio.wrap_future(reading)
        raise ApiError(499, "The client left before its request was read", code="client_left")

    def close(self) -> None:
        """Parse nothing more."""
        for _, _, threads in self._pools:
            threads.shutdown(wait=False, cancel_futures=True)
