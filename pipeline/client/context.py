"""Headers of whatever the current context asks a server, beside the client's own: a trace, such as `traceparent`."""

from __future__ import annotations

from contextvars import ContextVar

request_headers: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("request_headers", default=())
