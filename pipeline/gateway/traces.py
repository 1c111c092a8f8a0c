"""Spans of requests by OpenTelemetry: `traceparent` comes in, goes on to Triton, and into answers and logs.

Written against W3C Trace Context 1 and OpenTelemetry's semantic conventions for HTTP servers (1.37, stable): answers of
4xx are no errors of the server, and leave the status of its span unset. The API (1.30 and newer) exports nothing; spans
are exported by the SDK (OTLP 1 over HTTP) where the extra `traces` is installed and an endpoint is named.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from pipeline.client import request_headers
from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.gateway.settings import TRACES_VARIABLES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SERVICE_NAME = "pipeline-gateway"  # unless OTEL_SERVICE_NAME is set


def parse_traceparent(header: str | None) -> SpanContext | None:
    """Parse a `traceparent` header; None if it is missing or invalid.

    >>> hex(parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id)
    '0xb7ad6b7169203331'
    """
    match = _TRACEPARENT.fullmatch((header or "").strip())
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def random_hex(digits: int) -> str:
    """Draw an id that tells requests apart. It is not fit for secrets."""
    return f"{random.getrandbits(4 * digits):0{digits}x}"


@dataclass(frozen=True, slots=True)
class Span:
    """One operation within a trace, with times by `time.perf_counter()`.

    Attributes:
        offset_ns: epoch at 0 of that clock; the same for all spans of a request, so that their order is kept.
    """

    span: trace.Span
    tracer: trace.Tracer
    offset_ns: int

    @property
    def context(self) -> SpanContext:
        """Position of the span in its trace."""
        return self.span.get_span_context()

    @property
    def recording(self) -> bool:
        """Whether the span is going to be exported."""
        return self.span.is_recording()

    def traceparent(self) -> str:
        """Format the `traceparent` header."""
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def start_child(self, name: str, *, client: bool = False, began: float | None = None) -> Span:
        """Start a span below this one; a span that is not ended is not exported.

        Args:
            client: whether it is a call of another server, and not a step within this one.
            began: when it began; None is now.
        """
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        context, began_ns = set_span_in_context(self.span), self._epoch_ns(began)
        span = self.tracer.start_span(name, context=context, kind=kind, start_time=began_ns)
        return Span(span, self.tracer, self.offset_ns)

    def add_event(self, name: str, at: float) -> None:
        """Note that something happened."""
        self.span.add_event(name, timestamp=self._epoch_ns(at))

    def end(
        self, attributes: Mapping[str, Any], *, error: str | None = None, ended: float | None = None
    ) -> None:
        """End the span.

        Args:
            attributes: attributes of the span; those that are None are left out.
            error: description of the fault, if it makes this a failed operation.
            ended: when it ended; None is now.
        """
        self.span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error is not None:
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end(self._epoch_ns(ended))

    def _epoch_ns(self, at: float | None) -> int:
        return self.offset_ns + round((time.perf_counter() if at is None else at) * 1e9)


def propagate(span: Span) -> None:
    """Make a span the parent of what servers that are asked from now on do, within the current task."""
    others = (header for header in request_headers.get() if header[0] != "traceparent")
    request_headers.set((("traceparent", span.traceparent()), *others))


class Tracer:
    """Starts spans of requests. Without a provider they have ids, and are exported nowhere."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = trace.NoOpTracer() if provider is None else provider.get_tracer("pipeline.gateway")

    def start_span(self, name: str, parent: SpanContext | None) -> Span:
        """Start a span.

        Args:
            parent: span of the client, if the request names it.
        """
        offset_ns = time.time_ns() - time.perf_counter_ns()
        if self._provider is None:
            trace_id = random.getrandbits(128) if parent is None else parent.trace_id
            flags = TraceFlags.get_default() if parent is None else parent.trace_flags
            own = SpanContext(trace_id, random.getrandbits(64), is_remote=False, trace_flags=flags)
            return Span(NonRecordingSpan(own), self._tracer, offset_ns)
        context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
        began_ns = offset_ns + time.perf_counter_ns()
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, start_time=began_ns)
        return Span(span, self._tracer, offset_ns)

    def close(self) -> None:
        """Export what has not been exported yet."""
        if self._provider is not None:
            self._provider.shutdown()


def make_tracer(endpoint: str | None) -> Tracer:
    """Make a tracer that exports to an endpoint in batches, or a tracer that exports nothing if no endpoint is named.

    Spans that cannot be delivered are dropped.

    Args:
        endpoint: OTLP receiver such as http://127.0.0.1:4318; None takes that of OpenTelemetry's environment variables.

    Raises:
        UserError: an endpoint is named, and OpenTelemetry's SDK is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in TRACES_VARIABLES):
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(f"traces need OpenTelemetry ({error}): {install_line('traces')}") from None
    url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
    resource = Resource.create({"service.name": _SERVICE_NAME})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(provider)
