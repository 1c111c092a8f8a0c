"""The ASGI application: its routes, and the way of a request from authentication to the response.

A completion is parsed and checked here (`_generate`), becomes a `Completion`, and is answered by `responses`. Requests
that take long to parse are parsed in threads, so that streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.client import ClientError, PromptTooLong
from pipeline.gateway.access_log import AccessLog, RequestRecord
from pipeline.gateway.completions import Completion
from pipeline.gateway.embeddings import EmbeddingModel, create_embeddings, embedding_model_name
from pipeline.gateway.errors import ApiError, error_response, from_client_error, internal_error
from pipeline.gateway.false_hits import CacheHits
from pipeline.gateway.limits import FairQueue, Tenant
from pipeline.gateway.metric_names import MetricNames
from pipeline.gateway.metrics import GatewayMetrics, Restarts
from pipeline.gateway.prompt_log import PromptLog
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.responses import EventStream, RecordedCompletion, cancel_on_disconnect, json_response
from pipeline.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FalseHitRequest,
    parse_request,
)
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.traces import LocalTracer, Tracer
from pipeline.gateway.web import AllowedHosts, WebGuard, with_cors

_MAX_BODY_BYTES = 4 * 2**20
_MAX_ARRIVING_BYTES = 256 * 2**20  # of all bodies that are being received
# Up to this size (bytes of JSON) parsing a request and counting its tokens takes about a millisecond.
_SMALL_BYTES = 8 * 1024
# Largest request of each pool of threads. There are several, so that no request waits for much longer ones.
_POOLS = (64 * 1024, 512 * 1024, sys.maxsize)
_PARSED_BYTES_PER_S = 1e6  # about, by one thread
_MAX_WAITING = 64  # requests for the threads of a pool
_Parsed = TypeVar("_Parsed")


class Gateway:
    """All models behind one ASGI application, `app`."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        tenants: Tenants,
        *,
        hosts: AllowedHosts | None = None,
        origins: Sequence[str] = (),
        max_body_bytes: int = _MAX_BODY_BYTES,
        tracer: Tracer | None = None,
        prompt_log: PromptLog | None = None,
        metric_names: Sequence[MetricNames] = (),
        restarts: Restarts = dict,
        kv_cache_usage: Callable[[], Mapping[str, float]] = dict,
        followers: Sequence[RecordFollower] = (),
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
        """
        self.models, self.tenants = dict(models), tenants
        self.metrics = GatewayMetrics(self.models, names=metric_names, restarts=restarts)
        self._followers = {follower.name: follower for follower in followers}
        self.draining = False
        self._max_body_bytes = max_body_bytes
        self._parsers = ParserThreads()
        self._hits = CacheHits()
        self._arriving_bytes = 0
        self._kv_cache_usage = kv_cache_usage
        self._tracer = tracer or LocalTracer()
        generating = {"/v1/chat/completions": self._chat, "/v1/completions": self._complete}
        application = Starlette(
            routes=[
                Route("/", self._page),
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
                Route("/v1/embeddings", self._embed, methods=["POST"]),
                Route("/v1/cache/false_hits", self._report_false_hit, methods=["POST"]),
                Route("/v1/models", self._list),
                Route("/v1/models/{name:path}", self._show),
                Route("/metrics", self._metrics),
                Route("/healthz", self._healthy),
                Route("/readyz", self._ready),
            ],
            lifespan=self._lifespan,
            exception_handlers={
                ApiError: _answer_error,
                404: _not_found,
                405: _not_found,
                500: _internal_error,
            },
        )
        guarded = WebGuard(
            DirectRoutes(generating, application), hosts or AllowedHosts(), origins, keys=tenants.require_keys
        )
        self.app = AccessLog(with_cors(guarded, origins), self._tracer, self.metrics, prompt_log=prompt_log)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        for model in self.models.values():
            model.readiness.start()
        following = [asyncio.create_task(follower.run(self.models)) for follower in self._followers.values()]
        yield
        for task in following:
            task.cancel()
        for follower in self._followers.values():
            await follower.aclose()
        for model in self.models.values():
            await model.aclose()
        self._parsers.close()
        await asyncio.to_thread(self._tracer.close)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def _generate(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        tenant = self._authenticate(request)
        record: RequestRecord = request.scope["record"]
        body = await self._receive_body(request)

        def parse() -> ChatRequest | CompletionRequest:
            parsed = parse_request(kind, body)
            record.fields["model"] = self._find_model(parsed.model).name
            return parsed

        def begin(parsed: ChatRequest | CompletionRequest) -> Completion:
            return Completion(parsed, self._find_model(parsed.model), tenant, record.id, record.span)

        try:
            if len(body) > _SMALL_BYTES:
                completion = await self._parsers.run(lambda: begin(parse()), request, len(body), tenant)
            elif (parsed := parse()).has_schemas:
                completion = await self._parsers.run(lambda: begin(parsed), request, len(body), tenant)
            else:
                completion = begin(parsed)
        except PromptTooLong as error:
            tenant.charge_tokens(error.tokens)
            answered = from_client_error(error)
            answered.param = "messages" if kind is ChatRequest else "prompt"
            raise answered from error
        except ClientError as error:
            raise from_client_error(error) from error
        recorded = RecordedCompletion(completion, self.metrics, self._hits, record)
        return EventStream(recorded) if completion.streams else await json_response(request, recorded)

    async def _embed(self, request: Request) -> Response:
        tenant = self._authenticate(request)
        body = await self._receive_body(request)
        record: RequestRecord = request.scope["record"]

        def count() -> tuple[EmbeddingRequest, EmbeddingModel, list[int]]:
            parsed = parse_request(EmbeddingRequest, body)
            embedder = self._find_embedder(parsed.model)
            return parsed, embedder, [embedder.tokens(text) for text in parsed.texts]

        parsed, embedder, counts = await self._parsers.run(count, request, len(body), tenant)
        record.fields |= {"model": parsed.model, "prompt_tokens": sum(counts)}
        with tenant.enforce_limits(sum(counts)):
            answer = await create_embeddings(parsed, embedder, counts)
        self.metrics.count_tokens(tenant.name, "prompt", sum(counts))
        return JSONResponse(answer)

    async def _report_false_hit(self, request: Request) -> Response:
        tenant = self._authenticate(request)
        report = parse_request(FalseHitRequest, await self._receive_body(request))
        return JSONResponse(await self._hits.report(tenant.name, report.request_id, self.models))

    def _authenticate(self, request: Request) -> Tenant:
        """Find the tenant of a request, and count the request.

        Raises:
            ApiError: 401 without a key that is known; 429, if the tenant's requests are used up; 503 while stopping.
        """
        if self.draining:
            raise ApiError(503, "The server is stopping; ask another one", code="draining", retry_after_s=1)
        tenant = self.tenants.authenticate(request.headers.get("authorization"))
        request.scope["record"].fields["tenant"] = tenant.name
        tenant.count_request()
        return tenant

    async def _receive_body(self, request: Request) -> bytes:
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
                if len(body) > self._max_body_bytes:
                    text = f"The body is larger than {self._max_body_bytes} bytes"
                    raise ApiError(413, text, code="body_too_large")
                if len(body) > _SMALL_BYTES:
                    self._arriving_bytes += len(body) - counted
                    counted = len(body)
                    if self._arriving_bytes > _MAX_ARRIVING_BYTES:
                        text = "Too many large requests come at once"
                        raise ApiError(503, text, code="overloaded", retry_after_s=1)
            return bytes(body)
        finally:
            self._arriving_bytes -= counted

    def _find_model(self, name: str) -> ServedModel:
        model = self.models.get(name)
        if model is None:
            text = f"The model `{name}` does not exist; there are: {', '.join(self.models)}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return model

    def _find_embedder(self, name: str) -> EmbeddingModel:
        """Find an encoder by the name of a deployment that has one, or by its own."""
        embedders = {key: model.embedder for key, model in self.models.items() if model.embedder is not None}
        embedders |= {embedding_model_name(embedder): embedder for embedder in embedders.values()}
        if name not in embedders:
            self._find_model(name)
            text = f"The model `{name}` has no embeddings: its recipe has no semantic cache (cache.semantic)"
            raise ApiError(404, text, param="model", code="model_not_found")
        return embedders[name]

    async def _list(self, request: Request) -> Response:
        self.tenants.authenticate(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": list(self._descriptions().values())})

    async def _show(self, request: Request) -> Response:
        self.tenants.authenticate(request.headers.get("authorization"))
        name, descriptions = request.path_params["name"], self._descriptions()
        if name not in descriptions:
            self._find_model(name)
        return JSONResponse(descriptions[name])

    def _descriptions(self) -> dict[str, dict[str, Any]]:
        """OpenAI's object of each model, by name; encoders come after all models."""
        lengths = {
            model.name: (model.created, model.prompt_limit.max_tokens + model.max_output_tokens)
            for model in self.models.values()
        }
        for model in self.models.values():
            if model.embedder is not None:
                name = embedding_model_name(model.embedder)
                lengths.setdefault(name, (model.created, model.embedder.max_tokens))
        return {
            name: {
                "id": name, "object": "model", "created": created, "owned_by": "pipeline", "max_model_len": length
            }
            for name, (created, length) in lengths.items()
        }  # fmt: skip

    async def _page(self, _: Request) -> Response:
        html, policy = _chat_page()
        return HTMLResponse(html, headers={"content-security-policy": policy})

    async def _metrics(self, request: Request) -> Response:
        faults = self._faults()
        ready = {name: name not in faults for name in self.models}
        usage = await asyncio.to_thread(self._kv_cache_usage)
        page, content_type = self.metrics.render(request.headers.get("accept", ""), ready, usage)
        return Response(page, headers={"content-type": content_type})

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        """200 if any model can be asked, with what is wrong with the others, and which package each model is of."""
        faults = self._faults()
        ready = len(faults) < len(self.models) and not self.draining
        if self.draining:
            faults["gateway"] = "draining"
        # These can be asked all the same.
        stale = {name: one.fault for name, one in self._followers.items() if one.fault is not None}
        models = {
            name: {
                "deployment": model.deployment,
                "endpoints": list(model.client.urls),
                "replaced_requests": one.replaced_requests if (one := self._followers.get(name)) else 0,
            }
            for name, model in self.models.items()
        }
        content = {"ready": ready, "faults": stale | faults, "models": models}
        return JSONResponse(content, 200 if ready else 503)

    def _faults(self) -> dict[str, str]:
        """What is wrong with each model that cannot be asked now."""
        faults = {name: model.readiness.fault for name, model in self.models.items()}
        return {name: fault for name, fault in faults.items() if fault}


class ParserThreads:
    """Threads that parse, render and tokenize requests, so that streams go on meanwhile."""

    def __init__(self) -> None:
        threads = max(1, (os.cpu_count() or 1) // 4)
        self._pools = [
            (
                most_bytes,
                FairQueue(threads, max_waiting=_MAX_WAITING, s_per_token=1 / _PARSED_BYTES_PER_S),
                ThreadPoolExecutor(threads, "requests"),
            )
            for most_bytes in _POOLS
        ]

    async def run(self, parse: Callable[[], _Parsed], request: Request, size: int, tenant: Tenant) -> _Parsed:
        """Call `parse` in a thread. What it raises is raised here.

        Args:
            parse: parses the request.
            request: of the client, who may leave meanwhile.
            size: of the body, in bytes.
            tenant: of the request; tenants take turns.

        Raises:
            ApiError: 429, if too many requests wait for a thread; 499, if the client leaves meanwhile.
        """
        _, queue, threads = next(pool for pool in self._pools if size <= pool[0])
        async with cancel_on_disconnect(request.receive), queue.slot(size, tenant.name):
            return await asyncio.get_running_loop().run_in_executor(threads, parse)
        raise ApiError(499, "The client left before its request was read", code="client_left")

    def close(self) -> None:
        """Parse nothing more."""
        for _, _, threads in self._pools:
            threads.shutdown(wait=False, cancel_futures=True)


class DirectRoutes:
    """Bypasses Starlette's layers where each microsecond is one of the time to first token."""

    def __init__(
        self, endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]], app: ASGIApp
    ) -> None:
        """
        Args:
            endpoints: path -> what answers a POST to it.
            app: answers everything else.
        """
        self._endpoints, self._app = endpoints, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except ApiError as error:
            response = error_response(scope, error)
        await response(scope, receive, send)


@cache
def _chat_page() -> tuple[str, str]:
    """The page at / and its Content-Security-Policy: its own script and style, and nothing from elsewhere."""
    html = (resources.files("pipeline.gateway") / "page.html").read_text("utf-8")
    digests = {
        tag: b64encode(sha256(html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].encode()).digest())
        for tag in ("script", "style")
    }
    own = "; ".join(f"{tag}-src 'sha256-{digest.decode()}'" for tag, digest in digests.items())
    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return html, f"{nothing}; {own}; connect-src 'self'; img-src data:"


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _internal_error(request: Request, _: Exception) -> Response:
    """The exception goes on to the access log, which has the request's id, and its record."""
    record = request.scope.get("record")
    return internal_error().response(record and record.id)


async def _not_found(request: Request, _: Exception) -> Response:
    text = f"Unknown request URL: {request.method} {request.url.path}"
    return error_response(request.scope, ApiError(404, text, code="unknown_url"))
