"""The HTTP side: routes, who may ask, and what is told of the models and of the gateway itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.client import ClientError
from pipeline.gateway.completions import Completion
from pipeline.gateway.embeddings import Embeds, embedding_model, embedding_tokens, embeddings
from pipeline.gateway.errors import ApiError, from_client
from pipeline.gateway.metrics import Metrics
from pipeline.gateway.page import page
from pipeline.gateway.responses import Events, Noted, whole
from pipeline.gateway.schema import ChatRequest, CompletionRequest, EmbeddingRequest, parse
from pipeline.gateway.served import Served
from pipeline.gateway.tenants import Tenant, Tenants
from pipeline.gateway.traces import Spans, Unsent
from pipeline.gateway.track import Track, Tracking

_MAX_BODY_BYTES = 4 * 2**20
_PROBE_S = 5


class Gateway:
    """All that is served, behind one ASGI application."""

    def __init__(
        self,
        models: Mapping[str, Served],
        tenants: Tenants,
        *,
        max_body_bytes: int = _MAX_BODY_BYTES,
        spans: Spans | None = None,
        log_as_json: bool = False,
    ) -> None:
        self.models, self.tenants, self.metrics = models, tenants, Metrics()
        self.draining = False
        self._max_body_bytes = max_body_bytes
        self._spans = spans or Unsent()
        generates = {"/v1/chat/completions": self._chat, "/v1/completions": self._complete}
        application = Starlette(
            routes=[
                Route("/", self._page),
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generates.items()),
                Route("/v1/embeddings", self._embed, methods=["POST"]),
                Route("/v1/models", self._list),
                Route("/v1/models/{name:path}", self._show),
                Route("/metrics", self._metrics),
                Route("/healthz", self._healthy),
                Route("/readyz", self._ready),
            ],
            lifespan=self._lifespan,
            exception_handlers={ApiError: _answer_error, 404: _not_found, 405: _not_found},
        )
        self.app = Tracking(Shortcut(generates, application), self._spans, as_json=log_as_json)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for served in self.models.values():
            await served.aclose()
        await asyncio.to_thread(self._spans.close)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def _generate(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        tenant = self._admitted(request)
        asked = parse(kind, await self._body(request))
        served = self._model(asked.model)
        track: Track = request.scope["track"]
        track.fields |= {"tenant": tenant.name, "model": served.name}
        try:
            completion = Completion(asked, served, tenant, track.id)
        except ClientError as error:
            raise from_client(error) from error
        noted = Noted(completion, self.metrics, request.scope["path"], track)
        return Events(noted) if asked.stream else await whole(request, noted)

    async def _embed(self, request: Request) -> Response:
        tenant = self._admitted(request)
        asked = parse(EmbeddingRequest, await self._body(request))
        embedder = self._embedder(asked.model)
        tokens = embedding_tokens(asked, embedder)
        request.scope["track"].fields |= {
            "tenant": tenant.name,
            "model": asked.model,
            "prompt_tokens": tokens,
        }
        with tenant.request(tokens):
            answer = await embeddings(asked, embedder, tokens)
        self.metrics.request(request.scope["path"], asked.model, 200)
        return JSONResponse(answer)

    def _admitted(self, request: Request) -> Tenant:
        if self.draining:
            raise ApiError(503, "The server is stopping; ask another one", code="draining", retry_after_s=1)
        return self.tenants.of(request.headers.get("authorization"))

    def _embedder(self, name: str) -> Embeds:
        """By the name of a deployment that has one, or by its own."""
        found = {
            model: served.embedder for model, served in self.models.items() if served.embedder is not None
        }
        found |= {embedding_model(one): one for one in found.values()}
        if name not in found:
            self._model(name)
            text = f"The model `{name}` has no embeddings: its recipe has no semantic cache (cache.semantic)"
            raise ApiError(404, text, param="model", code="model_not_found")
        return found[name]

    async def _body(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._max_body_bytes:
                raise ApiError(
                    413, f"The body is larger than {self._max_body_bytes} bytes", code="body_too_large"
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def _model(self, name: str) -> Served:
        found = self.models.get(name)
        if found is None:
            known = ", ".join(self.models)
            raise ApiError(
                404,
                f"The model `{name}` does not exist; there are: {known}",
                param="model",
                code="model_not_found",
            )
        return found

    async def _list(self, request: Request) -> Response:
        self.tenants.of(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": list(self._described().values())})

    async def _show(self, request: Request) -> Response:
        self.tenants.of(request.headers.get("authorization"))
        name, described = request.path_params["name"], self._described()
        if name not in described:
            self._model(name)
        return JSONResponse(described[name])

    def _described(self) -> dict[str, dict[str, Any]]:
        found = {served.name: _describe(served) for served in self.models.values()}
        for served in self.models.values():
            if served.embedder is not None:
                name = embedding_model(served.embedder)
                found.setdefault(
                    name, _model_of(name, served.created, max_model_len=served.embedder.max_tokens)
                )
        return found

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(page())

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(
            self.metrics.page(self.models.values()), media_type="text/plain; version=0.0.4"
        )

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        """200 if a deployment answers requests; what is wrong with the others is told."""
        answers = await asyncio.gather(*(_fault(served) for served in self.models.values()))
        faults = {name: fault for name, fault in zip(self.models, answers, strict=True) if fault}
        ready = len(faults) < len(self.models) and not self.draining
        if self.draining:
            faults["gateway"] = "draining"
        return JSONResponse({"ready": ready, "faults": faults}, 200 if ready else 503)


class Shortcut:
    """Goes round Starlette's layers where each microsecond is one of the first token."""

    def __init__(self, posts: Mapping[str, Callable[[Request], Awaitable[Response]]], app: ASGIApp) -> None:
        """`posts`: what answers a POST to a path; all else goes to `app`."""
        self._posts, self._app = posts, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._posts.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except ApiError as error:
            response = await _answer_error(request, error)
        await response(scope, receive, send)


async def _fault(served: Served) -> str | None:
    """Why a deployment answers nothing now."""
    try:
        async with asyncio.timeout(_PROBE_S):
            return None if await served.plain.ready() else f"{served.plain.model_name} is not ready"
    except (ClientError, TimeoutError) as error:
        return str(error) or f"no answer within {_PROBE_S} s"


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    track = request.scope.get("track")
    if track is not None:
        track.error = error.message
    return error.response(track.id if track is not None else None)


async def _not_found(request: Request, _: Exception) -> Response:
    text = f"Unknown request URL: {request.method} {request.url.path}"
    return await _answer_error(request, ApiError(404, text, code="unknown_url"))


def _describe(served: Served) -> dict[str, Any]:
    longest = served.bounds.max_input_tokens + served.bounds.max_output_tokens
    return _model_of(served.name, served.created, max_model_len=longest)


def _model_of(name: str, created: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "pipeline", **more}
