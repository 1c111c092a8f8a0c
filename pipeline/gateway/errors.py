"""API errors as OpenAI's clients read them: a status, and {"error": {message, type, param, code}}.

Clients of Anthropic's API get them as they read them: {"type": "error", "error": {type, message}}.
"""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from pipeline.client import (
    Busy,
    ClientError,
    ConnectFailed,
    DeadlineExceeded,
    ModelNotFound,
    PromptTooLong,
    Refused,
    ServerLost,
)
from pipeline.client.sampling import PARAMETERS

# Types of errors that are neither "invalid_request_error" (below 500) nor "server_error".
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Code of a request that is refused because it may be the cause of lost servers.
QUARANTINED = "request_quarantined"
# After these the rest of the request is not read, so the connection has to be closed.
_CLOSING = (408, 413)


class ApiError(Exception):
    """An error response. Raise it wherever a request is handled."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """
        Args:
            param: field of the request that is at fault.
            code: kind of fault, for programs.
            retry_after_s: seconds after which it is worth asking again.
            completion_tokens: tokens of the answer that had come, if it broke off.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s, self.completion_tokens = retry_after_s, completion_tokens

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the JSON object of the error, with the id of the request if it is given."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error: dict[str, Any] = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        if self.completion_tokens is not None:
            error["completion_tokens"] = self.completion_tokens
        return {"error": error if request_id is None else {**error, "request_id": request_id}}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the JSON object of the error as Anthropic has it."""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, scope: Scope | None = None) -> Response:
        """Return the HTTP response.

        Args:
            scope: the request's; None: nothing of it was read.
        """
        record = None if scope is None else scope.get("record")
        request_id = None if record is None else record.id
        body = self.body if scope is None or not is_anthropic(scope) else self.anthropic_body
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.code == QUARANTINED:
            # Clients of OpenAI and Anthropic repeat every 500 by themselves otherwise.
            headers["x-should-retry"] = "false"
        if self.status in _CLOSING:
            headers["Connection"] = "close"
        return Response(json.dumps(body(request_id)), self.status, headers, "application/json")


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API. The models have the same path in OpenAI's."""
    path: str = scope["path"]
    if path.startswith("/v1/messages"):
        return True
    return path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])


def internal_error() -> ApiError:
    """Return the answer to a request that the server fails by a fault of its own; only its log says more."""
    return ApiError(500, "The server failed; its log has more under this id", code="internal_error")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response to a request that is refused, and note the error in its record, if there is a record."""
    if (record := scope.get("record")) is not None:
        record.error, record.error_type = error.message, error.code
    return error.response(scope)


def to_api_error(error: Exception) -> ApiError:
    """Map an exception, or the first one of a group, to an API error.

    Raises:
        Exception: the exception itself, if it is neither an `ApiError` nor a `ClientError`.
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientError):
        return from_client_error(error)
    raise error


def from_client_error(error: ClientError) -> ApiError:
    """Map an error of the connection to Triton to an API error."""
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
        case Busy():
            return ApiError(503, str(error), code="overloaded", retry_after_s=1)
        case ServerLost():
            return ApiError(502, str(error), code="upstream_lost", retry_after_s=1)
        case _:
            return ApiError(502, str(error), code="upstream_error")
