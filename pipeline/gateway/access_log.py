"""Each request from its first byte to its last: its id, its trace, one line of the log, one span, one count.

The id is the client's own `X-Request-ID` where it sends a usable one. Answers carry it, errors tell it.
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
from pipeline.gateway.metrics import Metrics
from pipeline.gateway.traces import Span, Spans, Trace, hex_digits

log = logging.getLogger("pipeline.gateway")
_ID = re.compile(r"[\w.-]{1,64}")
_UNTRACKED = ("/", "/metrics", "/healthz", "/readyz")
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models")
# Of W3C Trace Context: what has to go on at least, what of more goes first, and how many entries there may be.
_STATE_CHARS, _MEMBER_CHARS, _MEMBERS = 512, 128, 32


@dataclass(slots=True)
class Track:
    """What is known of a request; whoever answers it adds to `fields`."""

    id: str
    span: Span
    status: int = 499  # that was sent; the client left before there was one
    outcome: int | None = None  # what it would have been, had it not been sent before the end was known
    error: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class Tracking:
    """Around an ASGI application, which finds the `Track` of a request in scope["track"]."""

    def __init__(self, app: ASGIApp, spans: Spans, metrics: Metrics, *, as_json: bool = False) -> None:
        """`as_json`: lines of the log are JSON objects."""
        self._app, self._spans, self._metrics, self._as_json = app, spans, metrics, as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACKED:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        parent = Trace.read(headers.get(b"traceparent", b"").decode("latin-1"))
        span = self._spans.begin(f"{scope['method']} {scope['path']}", parent)
        track = Track(given if _ID.fullmatch(given) else hex_digits(32), span)
        scope["track"], began = track, time.perf_counter()
        traceparent = span.trace.header()
        own = [(b"x-request-id", track.id.encode()), (b"traceparent", traceparent.encode())]

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                track.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        beside = (("traceparent", traceparent), *(_state(scope["headers"]) if parent else ()))
        token = request_headers.set(beside)
        try:
            await self._app(scope, receive, sent)
        finally:
            request_headers.reset(token)
            self._over(scope, track, (time.perf_counter() - began) * 1e3)

    def _over(self, scope: Scope, track: Track, took_ms: float) -> None:
        span, path = track.span, scope["path"]
        endpoint = path if path in _ENDPOINTS else "other"
        self._metrics.count_request(endpoint, track.fields.get("model", ""), track.outcome or track.status)
        attributes = {
            "http.request.method": scope["method"],
            "url.path": path,
            "http.response.status_code": track.status,
        }
        own = {f"pipeline.{name}": value for name, value in track.fields.items()}
        span.end({**attributes, "pipeline.request_id": track.id, **own}, track.error)
        if not log.isEnabledFor(logging.INFO):
            return
        told = {
            "request_id": track.id, "trace_id": span.trace.trace_id, "path": path, "status": track.status,
            "ms": round(took_ms, 1), **track.fields, **({"error": track.error} if track.error else {}),
        }  # fmt: skip
        if self._as_json:
            log.info("%s", json.dumps(told, ensure_ascii=False))
        else:
            log.info("%s", " ".join(f"{name}={_word(value)}" for name, value in told.items()))


def log_to_stderr(*, as_json: bool) -> None:
    """One line a request; JSON objects have nothing before them."""
    form = "%(message)s" if as_json else "%(asctime)s %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)


def _state(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """`tracestate` goes on as it came, if it can; a long one is shortened as the standard says (section 3.3.1.5)."""
    state = b",".join(value for name, value in headers if name == b"tracestate").decode("latin-1")
    if len(state) > _STATE_CHARS:
        members = [part.strip() for part in state.split(",") if len(part.strip()) <= _MEMBER_CHARS]
        members = [part for part in members if part][:_MEMBERS]
        while members and len(",".join(members)) > _STATE_CHARS:
            members.pop()
        state = ",".join(members)
    return (("tracestate", state),) if state.isascii() and state.isprintable() and state else ()


def _word(value: Any) -> str:
    """Of a line that is split at spaces."""
    text = "-" if value in (None, "") else str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s"=]', text) else text
