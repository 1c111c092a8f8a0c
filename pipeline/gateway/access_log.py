"""Middleware around all requests: an id, a trace, one log line, one span and one count for each.

The id is the client's own `X-Request-ID` where it sends a usable one. Answers carry it, and errors name it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.client import request_headers
from pipeline.gateway.metrics import GatewayMetrics
from pipeline.gateway.traces import Span, TraceContext, Tracer, random_hex

_log = logging.getLogger("pipeline.gateway")
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")
_UNLOGGED = ("/", "/metrics", "/healthz", "/readyz")
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models")
# Of W3C Trace Context: the length that has to be propagated at least, the length of a list member from which on it is
# dropped first, and the most members that there may be.
_STATE_CHARS, _MEMBER_CHARS, _MEMBERS = 512, 128, 32


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request. Whoever answers it adds to `fields`."""

    id: str
    span: Span
    began: float = field(default_factory=time.perf_counter)  # when it arrived
    status: int = 499  # that was sent; 499 if the client left before one was
    outcome: int | None = (
        None  # status that a stream would have had, had it not been sent before the end was known
    )
    error: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # of the log line and the span


class AccessLog:
    """ASGI middleware. Applications find the `RequestRecord` of a request in scope["record"]."""

    def __init__(
        self, app: ASGIApp, tracer: Tracer, metrics: GatewayMetrics, *, as_json: bool = False
    ) -> None:
        """
        Args:
            app: the application.
            tracer: starts a span for each request.
            metrics: count each request.
            as_json: whether log lines are JSON objects.
        """
        self._app, self._tracer, self._metrics, self._as_json = app, tracer, metrics, as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLOGGED:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        parent = TraceContext.parse(headers.get(b"traceparent", b"").decode("latin-1"))
        span = self._tracer.start_span(f"{scope['method']} {scope['path']}", parent)
        record = RequestRecord(given if _REQUEST_ID.fullmatch(given) else random_hex(32), span)
        scope["record"] = record
        traceparent = span.context.traceparent()
        own = [(b"x-request-id", record.id.encode()), (b"traceparent", traceparent.encode())]

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        upstream = (("traceparent", traceparent), *(_tracestate(scope["headers"]) if parent else ()))
        token = request_headers.set(upstream)
        try:
            await self._app(scope, receive, send_with_ids)
        finally:
            request_headers.reset(token)
            self._finish(scope, record, (time.perf_counter() - record.began) * 1e3)

    def _finish(self, scope: Scope, record: RequestRecord, took_ms: float) -> None:
        span, path = record.span, scope["path"]
        endpoint = path if path in _ENDPOINTS else "other"
        model = record.fields.get("model", "")
        tenant = record.fields.get("tenant", "")
        self._metrics.count_request(endpoint, model, record.outcome or record.status, tenant)
        attributes = {
            "http.request.method": scope["method"],
            "url.path": path,
            "http.response.status_code": record.status,
        }
        own = {f"pipeline.{name}": value for name, value in record.fields.items()}
        span.end({**attributes, "pipeline.request_id": record.id, **own}, record.error)
        if not _log.isEnabledFor(logging.INFO):
            return
        line = {
            "request_id": record.id, "trace_id": span.context.trace_id, "path": path, "status": record.status,
            "ms": round(took_ms, 1), **record.fields, **({"error": record.error} if record.error else {}),
        }  # fmt: skip
        if self._as_json:
            _log.info("%s", json.dumps(line, ensure_ascii=False))
        else:
            _log.info("%s", " ".join(f"{name}={_quoted(value)}" for name, value in line.items()))


def log_to_stderr(*, as_json: bool) -> None:
    """Write the log to standard error.

    Args:
        as_json: whether a line is a JSON object, with no time before it.
    """
    form = "%(message)s" if as_json else "%(asctime)s %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)


def _tracestate(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """The `tracestate` to propagate: as it came, or shortened as the standard says (section 3.3.1.5)."""
    state = b",".join(value for name, value in headers if name == b"tracestate").decode("latin-1")
    if len(state) > _STATE_CHARS:
        members = [part.strip() for part in state.split(",") if len(part.strip()) <= _MEMBER_CHARS]
        members = [part for part in members if part][:_MEMBERS]
        while members and len(",".join(members)) > _STATE_CHARS:
            members.pop()
        state = ",".join(members)
    return (("tracestate", state),) if state.isascii() and state.isprintable() and state else ()


def _quoted(value: Any) -> str:
    """A value of a line that is split at spaces."""
    text = "-" if value in (None, "") else str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s"=]', text) else text
