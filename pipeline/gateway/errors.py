"""Errors as OpenAI's clients read them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from pipeline.client import (
    ClientError,
    ConnectFailed,
    DeadlineExceeded,
    ModelNotFound,
    PromptTooLong,
    Refused,
)
from pipeline.client.sampling import PARAMETERS

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "invalid_request_error",
}
_CLOSES = (408, 413)  # the rest of the request is not read


class ApiError(Exception):
    """What a request is answered with instead."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told if request_id is None else {**told, "request_id": request_id}}

    def response(self, request_id: str | None = None) -> Response:
        """The HTTP response."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status in _CLOSES:
            headers["Connection"] = "close"
        return Response(json.dumps(self.body(request_id)), self.status, headers, "application/json")


def answer_error(scope: Scope, error: ApiError) -> Response:
    """The response to a request that is refused; the line of the log tells why."""
    track = scope.get("track")
    if track is None:
        return error.response()
    track.error = error.message
    return error.response(track.id)


def as_api_error(error: Exception) -> ApiError:
    """What is told of an error; of several, the first. What is none of ours is raised on."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientError):
        return from_client(error)
    raise error


def from_client(error: ClientError) -> ApiError:
    """What the deployment's error is to whoever asked."""
    match error:
        case PromptTooLong():
            text = f"This model takes prompts of at most {error.most} tokens; yours has {error.count}"
            return ApiError(400, text, code="context_length_exceeded")
        case Refused():
            # "temperature = -1.0: must be …" and the like
            name = str(error).partition(":")[0].partition(" ")[0]
            return ApiError(400, str(error), param=name if name in PARAMETERS else None)
        case ModelNotFound():
            return ApiError(404, str(error), code="model_not_found")
        case DeadlineExceeded():
            return ApiError(504, str(error), code="timeout")
        case ConnectFailed():
            return ApiError(503, str(error), code="unavailable", retry_after_s=5)
        case _:
            return ApiError(502, str(error), code="upstream_error")
