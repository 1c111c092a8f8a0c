"""Operations of the HTTP API. Routing, log, metrics and the description at /openapi.json are made from `ApiRoute`s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.gateway.errors import ApiError, error_response

Handler = Callable[[Request], Awaitable[Response]]
_Method = TypeVar("_Method", bound=Callable[[Any, Request], Awaitable[Response]])


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
        response: model of the answer's JSON body, where it is one.
        media_type: type of the answer; "" for one without a body.
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
        self.forms = frozenset(
            route.path for route in self.all if route.form is not None
        )  # paths that take files
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
        """
        Args:
            handlers: path -> handler of a POST to it; `app` answers everything else.
        """
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
