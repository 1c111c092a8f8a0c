"""Middleware around all requests: an id, a trace, one log line, one span and one count for each.

The id is the client's own `X-Request-ID` where it sends a usable one. Answers carry it, and errors name it. Attributes
of spans are those of OpenTelemetry's semantic conventions for HTTP servers (1.37, stable), and of each field of the log
line under `pipeline.`.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.client import request_headers
from pipeline.gateway.errors import internal_error, is_anthropic
from pipeline.gateway.metrics import GatewayMetrics
from pipeline.gateway.records import PromptLog, RequestRecord
from pipeline.gateway.traces import Tracer, parse_traceparent, random_hex
from pipeline.gateway.web import RouteTable
from pipeline.printable import PrintableFormatter, json_text
from pipeline.resources import parse_yaml

_log = logging.getLogger("pipeline.gateway")
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
# Of W3C Trace Context: the length that has to be propagated at least, the length of a list member from which on it is
# dropped first, and the most members that there may be.
_STATE_CHARS, _MEMBER_CHARS, _MEMBERS = 512, 128, 32

# Keys of the line of a request in the JSON log, in this order, and what they hold; null where there is nothing.
LOG_FIELDS: Mapping[str, str] = parse_yaml(
    (files("pipeline.gateway") / "data" / "log_fields.yaml").read_text(encoding="utf-8")
)


class AccessLog:
    """ASGI middleware. Applications find the `RequestRecord` of a request in scope["record"]."""

    def __init__(
        self,
        app: ASGIApp,
        tracer: Tracer,
        metrics: GatewayMetrics,
        routes: RouteTable,
        *,
        prompt_log: PromptLog | None = None,
    ) -> None:
        """
        Args:
            routes: routes of the application; spans and metrics name requests by them.
            prompt_log: logs prompts and answers; None: neither is logged.
        """
        self._app, self._tracer, self._metrics, self._prompt_log = app, tracer, metrics, prompt_log
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._routes.unlogged:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        parent = parse_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))
        route = self._routes.template(scope["path"])
        # Names are few: paths that nothing answers are no part of them.
        method = scope["method"] if scope["method"] in _METHODS else "HTTP"
        span = self._tracer.start_span(f"{method} {route}" if route else method, parent)
        record = RequestRecord(
            request_id if _REQUEST_ID.fullmatch(request_id) else random_hex(32),
            span,
            prompt_log=self._prompt_log,
        )
        scope["record"] = record
        traceparent = span.traceparent()
        own = [(b"x-request-id", record.id.encode()), (b"traceparent", traceparent.encode())]
        if is_anthropic(scope):
            own.append((b"request-id", record.id.encode()))
        started = complete = False

        async def send_with_ids(message: Message) -> None:
            nonlocal started, complete
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), *own, *record.headers]
                if record.rate_limits is not None:
                    message["headers"] += record.rate_limits()
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        upstream = (("traceparent", traceparent), *(_tracestate(scope["headers"]) if parent else ()))
        token = request_headers.set(upstream)
        try:
            await self._app(scope, receive, send_with_ids)
        except Exception as error:
            record.outcome, record.exception = 500, error
            record.error, record.error_type = str(error), type(error).__name__
            if not started:
                await internal_error().response(scope)(scope, receive, send_with_ids)
            elif not complete:
                if "peer" not in scope:
                    raise
                scope["peer"].abort()
        finally:
            request_headers.reset(token)
            self._finish(scope, record, headers, route)

    def _finish(
        self, scope: Scope, record: RequestRecord, headers: Mapping[bytes, bytes], route: str | None
    ) -> None:
        ended, path, fields = time.perf_counter(), scope["path"], record.fields
        outcome = record.outcome or record.status
        names = (fields.get(name) or "" for name in ("tenant", "adapter"))
        self._metrics.count_request(route or "other", fields.get("model", ""), outcome, *names)
        failed = outcome >= 500
        if record.span.recording:
            attributes = _http_attributes(scope, route, record.status, headers) | record.attributes
            attributes |= {
                f"pipeline.{name}": value for name, value in fields.items() if not isinstance(value, list)
            }
            attributes |= {"pipeline.request_id": record.id, "error.type": str(outcome) if failed else None}
            error = (record.error or f"status {outcome}") if failed else None
            record.span.end(attributes, error=error, ended=ended)
        if not _log.isEnabledFor(logging.INFO):
            return
        context, exception = record.span.context, record.exception if failed else None
        line = {
            "request_id": record.id, "trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}",
            "method": scope["method"], "path": path, "status": record.status, "outcome": outcome,
            "ms": round((ended - record.began) * 1e3, 1), **fields,
            "error": record.error, "error_type": record.error_type,
            "traceback": "".join(traceback.format_exception(exception)) if exception else None,
        }  # fmt: skip
        log_request(logging.ERROR if failed else logging.INFO, line)


def log_request(level: int, fields: Mapping[str, Any]) -> None:
    """Write the log line of a request.

    Args:
        level: level of `logging`.
        fields: some of `LOG_FIELDS`, and prompts and answers if they are wanted.
    """
    _log.log(level, "%s", _TextLine(fields), extra={"fields": fields})


class _TextLine:
    """Line of a request for people: key=value, without what is not known."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        known = {name: value for name, value in self._fields.items() if value not in (None, "", [])}
        return " ".join(f"{name}={_quoted(value)}" for name, value in known.items())


class JsonFormatter(logging.Formatter):
    """Writes each record of a log as one JSON object: requests by `LOG_FIELDS`, others with a message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"time": at, "level": record.levelname, "logger": record.name}
        fields: Mapping[str, Any] | None = getattr(record, "fields", None)
        if fields is not None:
            return json_text({**dict.fromkeys(LOG_FIELDS), **head, **fields})
        line: dict[str, Any] = {**head, "message": record.getMessage()}
        if record.exc_info and record.exc_info[1]:
            error = record.exc_info[1]
            line |= {"error": str(error), "error_type": type(error).__name__}
            line["traceback"] = "".join(traceback.format_exception(error))
        return json_text(line)


def log_to_stderr(*, as_json: bool) -> None:
    """Write the log to standard error, as text with the time, or as a JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    text = PrintableFormatter("%(asctime)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _http_attributes(
    scope: Scope, route: str | None, status: int, headers: Mapping[bytes, bytes]
) -> dict[str, Any]:
    method, known = scope["method"], scope["method"] in _METHODS
    address, port = scope.get("server") or (None, None)
    agent = headers.get(b"user-agent")
    return {
        "http.request.method": method if known else "_OTHER",
        "http.request.method_original": None if known else method,
        "http.route": route,
        "http.response.status_code": status,
        "url.path": scope["path"],
        "url.scheme": scope.get("scheme"),
        "server.address": address,
        "server.port": port,
        "client.address": (scope.get("client") or (None,))[0],
        "user_agent.original": agent.decode("latin-1") if agent else None,
    }


def _tracestate(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Make the `tracestate` to propagate: as it came, or shortened as the standard says (section 3.3.1.5)."""
    state = b",".join(value for name, value in headers if name == b"tracestate").decode("latin-1")
    if len(state) > _STATE_CHARS:
        members = [part.strip() for part in state.split(",") if len(part.strip()) <= _MEMBER_CHARS]
        members = [part for part in members if part][:_MEMBERS]
        while members and len(",".join(members)) > _STATE_CHARS:
            members.pop()
        state = ",".join(members)
    return (("tracestate", state),) if state.isascii() and state.isprintable() and state else ()


def _quoted(value: Any) -> str:
    """Write a value of a line that is split at spaces."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return json_text(text) if re.search(r'[\s"=]', text) else text
