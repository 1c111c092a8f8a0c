"""The HTTP side: routes, who may ask, and what is told of the models and of the gateway itself."""

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
from pipeline.gateway.access_log import Track, Tracking
from pipeline.gateway.completions import Completion
from pipeline.gateway.embeddings import Embeds, embedding_model, embeddings
from pipeline.gateway.errors import ApiError, answer_error, from_client
from pipeline.gateway.metrics import Metrics
from pipeline.gateway.queue import Admission
from pipeline.gateway.responses import Events, Noted, while_read, whole
from pipeline.gateway.schema import ChatRequest, CompletionRequest, EmbeddingRequest, parse
from pipeline.gateway.served import Served
from pipeline.gateway.tenants import Tenant, Tenants
from pipeline.gateway.traces import Spans, Unsent
from pipeline.gateway.web import AllowedHosts, WebGuard, with_cors

_MAX_BODY_BYTES = 4 * 2**20
_PROBE_S = 5
_MAX_ARRIVING_BYTES = 256 * 2**20  # of all bodies together, while they come
# Up to this size (bytes of JSON) reading a request and counting its tokens takes about a millisecond.
_SMALL_BYTES = 8 * 1024
# Larger ones are read by threads. Each of these sizes has its own, so that no request waits for much longer ones.
_LANES = (64 * 1024, 512 * 1024, sys.maxsize)
_BYTES_PER_S = 1e6  # about, that a thread reads
_MAX_WAITING = 64  # requests for the threads of a lane
_Read = TypeVar("_Read")


class Gateway:
    """All that is served, behind one ASGI application."""

    def __init__(
        self,
        models: Mapping[str, Served],
        tenants: Tenants,
        *,
        hosts: AllowedHosts | None = None,
        origins: Sequence[str] = (),
        max_body_bytes: int = _MAX_BODY_BYTES,
        spans: Spans | None = None,
        log_as_json: bool = False,
    ) -> None:
        """`hosts`: that requests may name, by default those of loopback; `origins`: of other pages that may ask."""
        self.models, self.tenants, self.metrics = models, tenants, Metrics(models)
        self.draining = False
        self._max_body_bytes = max_body_bytes
        self._reader = RequestReader()
        self._arriving_bytes = 0
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
        guarded = WebGuard(
            Shortcut(generates, application), hosts or AllowedHosts(), origins, keys=tenants.need_keys
        )
        self.app = Tracking(with_cors(guarded, origins), self._spans, self.metrics, as_json=log_as_json)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        for served in self.models.values():
            await served.aclose()
        self._reader.close()
        await asyncio.to_thread(self._spans.close)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def _generate(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        tenant = self._admitted(request)
        track: Track = request.scope["track"]
        body = await self._body(request)

        def read() -> ChatRequest | CompletionRequest:
            asked = parse(kind, body)
            track.fields["model"] = self._model(asked.model).name
            return asked

        def begin(asked: ChatRequest | CompletionRequest) -> Completion:
            return Completion(asked, self._model(asked.model), tenant, track.id)

        try:
            if len(body) > _SMALL_BYTES:
                completion = await self._reader.run(lambda: begin(read()), request, len(body), tenant)
            elif (asked := read()).has_schemas:
                completion = await self._reader.run(lambda: begin(asked), request, len(body), tenant)
            else:
                completion = begin(asked)
        except PromptTooLong as error:
            tenant.charge(error.tokens)
            told = from_client(error)
            told.param = "messages" if kind is ChatRequest else "prompt"
            raise told from error
        except ClientError as error:
            raise from_client(error) from error
        noted = Noted(completion, self.metrics, track)
        return Events(noted) if completion.streams else await whole(request, noted)

    async def _embed(self, request: Request) -> Response:
        tenant = self._admitted(request)
        body = await self._body(request)
        track: Track = request.scope["track"]

        def count() -> tuple[EmbeddingRequest, Embeds, list[int]]:
            asked = parse(EmbeddingRequest, body)
            embedder = self._embedder(asked.model)
            return asked, embedder, [embedder.tokens(text) for text in asked.texts]

        asked, embedder, counts = await self._reader.run(count, request, len(body), tenant)
        track.fields |= {"model": asked.model, "prompt_tokens": sum(counts)}
        with tenant.request(sum(counts)):
            answer = await embeddings(asked, embedder, counts)
        return JSONResponse(answer)

    def _admitted(self, request: Request) -> Tenant:
        if self.draining:
            raise ApiError(503, "The server is stopping; ask another one", code="draining", retry_after_s=1)
        tenant = self.tenants.of(request.headers.get("authorization"))
        request.scope["track"].fields["tenant"] = tenant.name
        tenant.admit()
        return tenant

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
        body, more, known = bytearray(), True, 0
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
                    self._arriving_bytes += len(body) - known
                    known = len(body)
                    if self._arriving_bytes > _MAX_ARRIVING_BYTES:
                        text = "Too many large requests come at once"
                        raise ApiError(503, text, code="overloaded", retry_after_s=1)
            return bytes(body)
        finally:
            self._arriving_bytes -= known

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
        html, policy = _chat_page()
        return HTMLResponse(html, headers={"content-security-policy": policy})

    async def _metrics(self, request: Request) -> Response:
        page, content_type = self.metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

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


class RequestReader:
    """Reads requests in threads, so that streams go on while a long one is parsed, rendered and tokenized."""

    def __init__(self) -> None:
        threads = max(1, (os.cpu_count() or 1) // 4)
        self._lanes = [
            (
                most_bytes,
                Admission(threads, max_waiting=_MAX_WAITING, s_per_token=1 / _BYTES_PER_S),
                ThreadPoolExecutor(threads, "requests"),
            )
            for most_bytes in _LANES
        ]

    async def run(self, read: Callable[[], _Read], request: Request, size: int, tenant: Tenant) -> _Read:
        """What `read` returns or raises.

        Args:
            size: of the request, in bytes.

        Raises:
            ApiError: 429, if too many wait to be read; 499, if the client leaves meanwhile.
        """
        _, places, threads = next(lane for lane in self._lanes if size <= lane[0])
        async with while_read(request.receive), places.place(size, tenant.name):
            return await asyncio.get_running_loop().run_in_executor(threads, read)
        raise ApiError(499, "The client left before its request was read", code="client_left")

    def close(self) -> None:
        """Read nothing more."""
        for _, _, threads in self._lanes:
            threads.shutdown(wait=False, cancel_futures=True)


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
            response = answer_error(scope, error)
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


async def _fault(served: Served) -> str | None:
    """Why a deployment answers nothing now."""
    try:
        async with asyncio.timeout(_PROBE_S):
            return None if await served.plain.ready() else f"{served.plain.model_name} is not ready"
    except (ClientError, TimeoutError) as error:
        return str(error) or f"no answer within {_PROBE_S} s"


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer_error(request.scope, error)


async def _not_found(request: Request, _: Exception) -> Response:
    text = f"Unknown request URL: {request.method} {request.url.path}"
    return answer_error(request.scope, ApiError(404, text, code="unknown_url"))


def _describe(served: Served) -> dict[str, Any]:
    longest = served.bounds.max_input_tokens + served.bounds.max_output_tokens
    return _model_of(served.name, served.created, max_model_len=longest)


def _model_of(name: str, created: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "pipeline", **more}
