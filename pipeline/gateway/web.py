"""Routes of the HTTP API, and guards against web pages that use it through the browser of somebody who can reach it.

Routing, log, metrics and the description at /openapi.json are made from `ApiRoute`s.

A page of any site may send requests to any address, and by DNS rebinding (a name of its own that suddenly means
127.0.0.1) read the answers, too. So requests have to name a host that is known, must not come from pages of other
origins, and carry JSON, which browsers send to other origins only if those agree (CORS; https://fetch.spec.whatwg.org).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.gateway.api.parsing import IGNORED_FIELDS, MAX_TOKENS
from pipeline.gateway.errors import ApiError, error_response

Handler = Callable[[Request], Awaitable[Response]]
_Method = TypeVar("_Method", bound=Callable[[Any, Request], Awaitable[Response]])

JSON, FORM = "application/json", "multipart/form-data"
# These tell nothing about models, and probes may name any host, such as the address of a pod.
_UNGUARDED = ("/health", "/healthz", "/readyz")
# The model stands in the body, as in OpenAI's own.
_AZURE = re.compile(r"^/openai(?:/deployments/[^/]+|/v1)/")
_MAX_SHOWN = 100  # characters of a header
_EXPOSED = (
    "request-id", "Retry-After", "traceparent", "X-Cache", "X-Request-ID", IGNORED_FIELDS, MAX_TOKENS,
    *(f"x-ratelimit-{kind}-{unit}" for kind in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One operation of the HTTP API; decorates the method of an `EndpointFamily` that answers it.

    >>> class Greetings(EndpointFamily):                                               # doctest: +SKIP
    ...     @ApiRoute("GET", "/hello", "Greet.", media_type="text/plain")
    ...     async def _greet(self, request: Request) -> Response: ...

    Attributes:
        method: GET, POST or DELETE.
        path: URL path; parameters as Starlette writes them, such as /v1/models/{name:path}.
        summary: one sentence for the description of the API.
        request: model of the JSON body; None: it takes none.
        form: model of the fields of a multipart form that has a file besides; None: it takes none.
        query: model of the URL's parameters; None: it takes none.
        response: model of the answer's JSON body, where it is an object of its own.
        media_type: type of the answer; "" for an answer without a body.
        direct: whether requests bypass Starlette's layers, because each microsecond is one of the time to first token;
            for POST to a path without parameters.
        logged: whether each request is logged, traced and counted.
    """

    method: str
    path: str
    summary: str
    request: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    media_type: str = "application/json"
    direct: bool = False
    logged: bool = True

    def __call__(self, handler: _Method) -> _Method:
        """Mark a method as the handler."""
        setattr(handler, _ROUTE, self)
        return handler


_ROUTE = "api_route"  # attribute of a method that an `ApiRoute` decorates


def routes_of(family: object) -> list[tuple[ApiRoute, Handler]]:
    """Return the decorated methods of an object, in the order in which its class defines them."""
    return [
        (method.__dict__[_ROUTE], getattr(family, name))
        for name, method in vars(type(family)).items()
        if _ROUTE in getattr(method, "__dict__", ())
    ]


def json_answer(answer: BaseModel) -> Response:
    """Return the response that has a model as its JSON body."""
    return Response(answer.model_dump_json(), media_type="application/json")


class RouteTable:
    """All routes of a gateway, by their paths."""

    def __init__(self, routes: Iterable[tuple[ApiRoute, Handler]]) -> None:
        pairs = tuple(routes)
        self.all = tuple(route for route, _ in pairs)
        self.unlogged = frozenset(route.path for route in self.all if not route.logged)
        # Paths that take files.
        self.forms = frozenset(route.path for route in self.all if route.form is not None)
        # Handlers of the routes that bypass Starlette's layers, by path.
        self.direct = {route.path: handler for route, handler in pairs if route.direct}
        self.starlette = [Route(route.path, handler, methods=[route.method]) for route, handler in pairs]
        compiled = [compile_path(route.path) for route in self.all]
        self._fixed = {path for _, path, parameters in compiled if not parameters}
        self._patterns = {path: pattern for pattern, path, parameters in compiled if parameters}

    def template(self, path: str) -> str | None:
        """Return the template of a path, such as /v1/models/{name}; None if no route has it."""
        if path in self._fixed:
            return path
        return next((template for template, pattern in self._patterns.items() if pattern.match(path)), None)


class DirectRoutes:
    """ASGI middleware that bypasses Starlette's layers where each microsecond is one of the time to first token."""

    def __init__(self, handlers: Mapping[str, Handler], app: ASGIApp) -> None:
        """`handlers`: path -> handler of a POST to it; `app` answers everything else."""
        self._handlers, self._app = handlers, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except ApiError as error:
            response = error_response(scope, error)
        await response(scope, receive, send)


class AllowedHosts:
    """Hosts that requests may name: those of loopback, and others that are listed.

    If the gateway listens on other addresses than loopback, any IP address is allowed: DNS rebinding needs a name.

    >>> hosts = AllowedHosts("0.0.0.0", ["gateway.example"])
    >>> [host for host in ("localhost:8080", "10.0.0.7", "gateway.example", "evil.example") if host in hosts]
    ['localhost:8080', '10.0.0.7', 'gateway.example']
    """

    def __init__(self, listens_on: str = "127.0.0.1", names: Sequence[str] = ()) -> None:
        """`names` are without port; `*.example.com` stands for all below it, `*` for all."""
        self.loopback = _is_loopback(listens_on)
        self._names = {name.lower() for name in (*names, listens_on)}
        self._ends = tuple(name.lower()[1:] for name in names if name.startswith("*."))
        self._allows = lru_cache(self._look_up)

    def __contains__(self, host: str) -> bool:
        """Whether a Host header names an allowed host."""
        return self._allows(host)

    def _look_up(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        if not colon or not port.isdecimal():
            name = host.lower()
        name = name.removesuffix(".").removeprefix("[").removesuffix("]")
        if "*" in self._names or name in self._names or _is_loopback(name):
            return bool(name)
        return name.endswith(self._ends) or (not self.loopback and _is_address(name))


class WebGuard:
    """ASGI middleware that refuses requests which a web page of another site may have sent."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: AllowedHosts,
        origins: Sequence[str],
        *,
        keys: bool,
        content_types: Sequence[str] = (JSON,),
        forms: Set[str] = frozenset(),
        refusal: Callable[[Scope, ApiError], ASGIApp] = error_response,
    ) -> None:
        """
        Args:
            origins: pages that may send requests, such as https://chat.example; `*` is all. The gateway's always may.
            keys: whether requests need an API key, which pages of other origins do not know.
            content_types: types of bodies, the usual one first; "" among them is a body without a type.
            forms: paths that take forms instead.
            refusal: makes the answer to a request that is refused.
        """
        self._app, self._hosts, self._keys = app, hosts, keys
        self._origins, self._refusal = frozenset(origins), refusal
        self._content_types, self._forms = content_types, forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = None
        if scope["type"] == "http" and scope["path"] not in _UNGUARDED:
            fault = self._fault(scope["method"], scope["path"], dict(scope["headers"]))
        await (self._app if fault is None else self._refusal(scope, fault))(scope, receive, send)

    def _fault(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if host not in self._hosts:
            text = (
                f"The host {host[:_MAX_SHOWN]!r} is not one of this server's: add it to gateway.allowed_hosts"
            )
            return ApiError(400, text, code="unknown_host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        known = self._keys or origin in self._origins or "*" in self._origins
        if origin and not known and origin.partition("://")[2].lower() != host.lower():
            text = f"Pages of {origin[:_MAX_SHOWN]} may not ask: add it to gateway.allowed_origins"
            return ApiError(403, text, code="unknown_origin")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        wanted = (FORM,) if path in self._forms else self._content_types
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if method == "POST" and kind.decode("latin-1") not in wanted and (kind or has_body):
            text = f"The content type of requests is {wanted[0]}: send the header Content-Type"
            return ApiError(415, text, code="unsupported_media_type")
        return None


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Add CORS for pages of these origins, if any: preflight requests are answered, and answers may be read."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def own_page(html: str) -> Response:
    """Return a page under a Content-Security-Policy: its own script and style, and nothing from elsewhere."""
    digests = {
        tag: b64encode(sha256(html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].encode()).digest())
        for tag in ("script", "style")
        if f"<{tag}>" in html
    }
    own = "; ".join(f"{tag}-src 'sha256-{digest.decode()}'" for tag, digest in digests.items())
    denied = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    policy = f"{denied}; {own}; connect-src 'self'; img-src data:"
    return HTMLResponse(html, headers={"content-security-policy": policy})


def with_azure_paths(app: ASGIApp) -> ASGIApp:
    """Answer Azure's URLs, too: /openai/deployments/<model>/chat/completions and /openai/v1/chat/completions."""

    async def rewritten(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/openai/"):
            scope = {**scope, "path": _AZURE.sub("/v1/", scope["path"])}
        await app(scope, receive, send)

    return rewritten


@lru_cache
def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
