"""The HTTP side: routes, who may ask, cancelling when the asker leaves, ids and times of each request."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pipeline.client import ClientError, Stats
from pipeline.gateway.completions import Completion
from pipeline.gateway.errors import ApiError, from_client
from pipeline.gateway.metrics import Metrics
from pipeline.gateway.page import page
from pipeline.gateway.schema import ChatRequest, CompletionRequest, parse
from pipeline.gateway.served import Served
from pipeline.gateway.tenants import Tenant, Tenants

_log = logging.getLogger("pipeline.gateway")
_MAX_BODY_BYTES = 4 * 2**20


class Gateway:
    """All that is served, behind one ASGI application."""

    def __init__(
        self, models: Mapping[str, Served], tenants: Tenants, *, max_body_bytes: int = _MAX_BODY_BYTES
    ) -> None:
        self.models, self.tenants, self.metrics = models, tenants, Metrics()
        self.draining = False
        self._max_body_bytes = max_body_bytes
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._list),
                Route("/v1/models/{name:path}", self._show),
                Route("/metrics", self._metrics),
                Route("/healthz", self._healthy),
                Route("/readyz", self._ready),
            ],
            lifespan=self._lifespan,
            exception_handlers={ApiError: _answer_error, 404: _not_found, 405: _not_found},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for served in self.models.values():
            await served.aclose()

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def _generate(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        tenant = self.tenants.of(request.headers.get("authorization"))
        asked = parse(kind, await self._body(request))
        served = self._model(asked.model)
        if isinstance(asked, CompletionRequest):
            prompt: Any = asked.prompts[0]
            if len(asked.prompts) > 1:
                raise ApiError(400, "Send one prompt a request", param="prompt", code="unsupported_parameter")
        else:
            prompt = asked.messages
        try:
            completion = Completion(asked, served, tenant, prompt)
        except ClientError as error:
            raise from_client(error) from error
        done = Done(self.metrics, request.url.path, served, tenant)
        return _Stream(completion, done) if asked.stream else await _whole(request, completion, done)

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
        return JSONResponse(
            {"object": "list", "data": [_describe(served) for served in self.models.values()]}
        )

    async def _show(self, request: Request) -> Response:
        self.tenants.of(request.headers.get("authorization"))
        return JSONResponse(_describe(self._model(request.path_params["name"])))

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(page())

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(
            self.metrics.page(self.models.values()), media_type="text/plain; version=0.0.4"
        )

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        """200 if every deployment answers what its model is."""
        faults = {} if not self.draining else {"gateway": "draining"}
        for name, served in self.models.items():
            try:
                async with asyncio.timeout(5):
                    await served.plain.model()
            except (ClientError, TimeoutError) as error:
                faults[name] = str(error) or "no answer"
        return JSONResponse({"ready": not faults, "faults": faults}, 503 if faults else 200)


class Done:
    """What is noted when a request is over."""

    def __init__(self, metrics: Metrics, path: str, served: Served, tenant: Tenant) -> None:
        self._metrics, self._path, self._served, self._tenant = metrics, path, served, tenant
        self._began = time.perf_counter()

    def __call__(self, completion: Completion, status: int, stats: list[Stats]) -> None:
        """Count it, and write the line of the log."""
        self._metrics.request(self._path, self._served.name, status)
        for one in stats:
            ttft_s = one.ttft_ms / 1e3 if one.ttft_ms is not None else None
            gaps = (gap / 1e3 for gap in one.itl_ms)
            prompt, completed = completion.job.prompt_tokens, one.output_tokens or 0
            self._metrics.answer(self._served.name, ttft_s, gaps, prompt, completed)
        took_ms = (time.perf_counter() - self._began) * 1e3
        cached = ",".join(one.cached.kind for one in stats if one.cached) or "-"
        _log.info(
            "%s %s tenant=%s model=%s status=%d ms=%.1f cached=%s",
            completion.id, self._path, self._tenant.name or "-", self._served.name, status, took_ms, cached,
        )  # fmt: skip


async def _whole(request: Request, completion: Completion, done: Done) -> Response:
    """The whole answer; given up when the asker leaves."""
    work = asyncio.ensure_future(completion.whole())
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        body = work.result()
    except (ApiError, ClientError, ExceptionGroup) as error:
        refused = _as_api_error(error)
        done(completion, refused.status, completion.stats)
        raise refused from error
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait([work, gone])
    done(completion, 200, completion.stats)
    return JSONResponse(body, headers={"x-request-id": completion.id})


class _Stream(Response):
    """The answer as events. The status waits for the first of them, so that what is refused is told by its status."""

    def __init__(self, completion: Completion, done: Done) -> None:
        self._completion, self._done = completion, done
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._send(scope, receive, send))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait([work, gone])

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        completion, started, status = self._completion, False, 200
        try:
            async for event in completion.events():
                if not started:
                    headers = [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-store"),
                        (b"x-accel-buffering", b"no"),
                        (b"x-request-id", completion.id.encode()),
                    ]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except (ApiError, ClientError, ExceptionGroup) as error:
            refused = _as_api_error(error)
            status = refused.status
            if not started:
                await refused.response()(scope, receive, send)
                return
            text = json.dumps(refused.body(), ensure_ascii=False)
            await send(
                {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
            )
        finally:
            self._done(completion, status, completion.stats)
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_api_error(error: Exception) -> ApiError:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientError):
        return from_client(error)
    raise error


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _not_found(request: Request, _: Exception) -> Response:
    text = f"Unknown request URL: {request.method} {request.url.path}"
    return ApiError(404, text, code="unknown_url").response()


def _describe(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "pipeline",
        "max_model_len": served.bounds.max_input_tokens + served.bounds.max_output_tokens,
    }
