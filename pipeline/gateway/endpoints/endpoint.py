"""What an endpoint of the HTTP API declares of itself, and a family of endpoints that share code.

Routes, log, metrics and the description at /openapi.json are made from these declarations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.gateway.errors import ApiError, error_response

if TYPE_CHECKING:
    from pipeline.gateway.context import GatewayContext

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """One operation of the HTTP API.

    Attributes:
        method: GET, POST or DELETE.
        path: of its URL; parameters as Starlette writes them, such as /v1/models/{name:path}.
        handler: answers a request; it may raise `ApiError`.
        summary: what it does, in one sentence.
        request: model of the JSON body; None: it takes none.
        form: model of the fields of a multipart form that has a file besides; None: it takes none.
        query: model of the parameters of the URL; None: it takes none.
        response: model of the answer's JSON body, where it is one.
        media_type: of the answer; "" for one without a body.
        direct: whether requests bypass Starlette's layers, because each microsecond is one of the time to first token;
            for POST to a path without parameters.
        logged: whether each request is logged, traced and counted.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    media_type: str = "application/json"
    direct: bool = False
    logged: bool = True


def json_answer(answer: BaseModel) -> Response:
    """Return the response that has a model as its JSON body."""
    return Response(answer.model_dump_json(), media_type="application/json")


class EndpointFamily(ABC):
    """Endpoints that belong together."""

    def __init__(self, context: GatewayContext) -> None:
        """
        Args:
            context: what all endpoints of the gateway share.
        """
        self.context = context

    @abstractmethod
    def endpoints(self) -> Sequence[ApiEndpoint]:
        """Return the endpoints."""

    async def start(self) -> None:  # noqa: B027
        """Begin what goes on beside requests; called once, in the event loop that serves."""

    async def aclose(self) -> None:  # noqa: B027
        """End what `start` began; called once, when no request is under way any more."""


class EndpointTable:
    """All endpoints of a gateway, by their paths."""

    def __init__(self, endpoints: Iterable[ApiEndpoint]) -> None:
        """
        Args:
            endpoints: of all families.
        """
        self.all = tuple(endpoints)
        self.unlogged = frozenset(one.path for one in self.all if not one.logged)
        self.forms = frozenset(one.path for one in self.all if one.form is not None)  # paths that take files
        compiled = [compile_path(one.path) for one in self.all]
        self._fixed = {path: path for _, path, parameters in compiled if not parameters}
        self._patterns = {path: pattern for pattern, path, parameters in compiled if parameters}

    @property
    def direct(self) -> Mapping[str, Handler]:
        """Handlers of the endpoints that bypass Starlette's layers, by path."""
        return {one.path: one.handler for one in self.all if one.direct}

    @property
    def routes(self) -> list[Route]:
        """Starlette's routes."""
        return [Route(one.path, one.handler, methods=[one.method]) for one in self.all]

    def template(self, path: str) -> str | None:
        """Return the template of a path, such as /v1/models/{name}; None if no endpoint has it."""
        if path in self._fixed:
            return path
        return next((one for one, pattern in self._patterns.items() if pattern.match(path)), None)


class DirectRoutes:
    """ASGI middleware that bypasses Starlette's layers where each microsecond is one of the time to first token."""

    def __init__(self, handlers: Mapping[str, Handler], app: ASGIApp) -> None:
        """
        Args:
            handlers: path -> what answers a POST to it.
            app: answers everything else.
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
