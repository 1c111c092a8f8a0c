"""Families of endpoints of the HTTP API: methods that `pipeline.gateway.routes.ApiRoute` decorates."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel
from starlette.responses import Response

from pipeline.gateway.context import GatewayContext
from pipeline.gateway.routes import ApiRoute, Handler, routes_of


def json_answer(answer: BaseModel) -> Response:
    """Return the response that has a model as its JSON body."""
    return Response(answer.model_dump_json(), media_type="application/json")


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
