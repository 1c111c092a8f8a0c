"""Trace contexts and spans: `traceparent` comes in, goes on to Triton, and into answers and logs.

Written against W3C Trace Context 1 and OpenTelemetry's semantic conventions for HTTP servers (1.37, stable): answers of
4xx are no errors of the server, and leave the status of its span unset. Spans are exported by OpenTelemetry's SDK (1.30
and newer; OTLP 1 over HTTP) where the extra `traces` is installed and an endpoint is named; otherwise a request has a
trace's ids and nothing is exported.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.client import request_headers
from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.gateway.settings import TRACES_VARIABLES

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SERVICE_NAME = "pipeline-gateway"  # unless OTEL_SERVICE_NAME is set


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position in a trace."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    flags: int = 1  # 1: sampled

    @classmethod
    def parse(cls, header: str | None) -> TraceContext | None:
        """Parse a `traceparent` header.

        Returns:
            The context, or None if the header is missing or invalid.

        >>> TraceContext.parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id
        'b7ad6b7169203331'
        """
        found = _TRACEPARENT.fullmatch((header or "").strip())
        return cls(found[1], found[2], int(found[3], 16)) if found else None

    def traceparent(self) -> str:
        """Format the `traceparent` header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def random_hex(digits: int) -> str:
    """Draw an id that tells requests apart. It is not fit for secrets."""
    return f"{random.getrandbits(4 * digits):0{digits}x}"


class Span(Protocol):
    """One operation within a trace. Times are by `time.perf_counter()`."""

    @property
    def context(self) -> TraceContext:
        """Position of this span."""
        ...

    @property
    def recording(self) -> bool:
        """Whether the span is going to be exported."""
        ...

    def start_child(self, name: str, *, client: bool = False, began: float | None = None) -> Span:
        """Start a span below this one; one that is not ended is not exported.

        Args:
            name: of the span.
            client: whether it is a call of another server, and not a step within this one.
            began: when it began; None is now.
        """
        ...

    def add_event(self, name: str, at: float) -> None:
        """Note that something happened.

        Args:
            name: of the event.
            at: when it happened.
        """
        ...

    def end(
        self, attributes: Mapping[str, Any], *, error: str | None = None, ended: float | None = None
    ) -> None:
        """End the span.

        Args:
            attributes: of the span; those that are None are left out.
            error: what went wrong, if that makes it a failed operation.
            ended: when it ended; None is now.
        """
        ...


def propagate(span: Span) -> None:
    """Make a span the parent of what servers that are asked from now on do, within the current task.

    Args:
        span: one that is under way.
    """
    others = (header for header in request_headers.get() if header[0] != "traceparent")
    request_headers.set((("traceparent", span.context.traceparent()), *others))


class Tracer(Protocol):
    """Starts spans."""

    def start_span(self, name: str, parent: TraceContext | None) -> Span:
        """Start a span.

        Args:
            name: of the span, such as POST /v1/embeddings.
            parent: span of the client, if the request names one.
        """
        ...

    def close(self) -> None:
        """Export what has not been exported yet."""
        ...


def make_tracer(endpoint: str | None) -> Tracer:
    """Make a tracer that exports to an endpoint, or one that exports nothing if none is named.

    Args:
        endpoint: OTLP receiver such as http://127.0.0.1:4318; None takes that of OpenTelemetry's environment variables.

    Raises:
        UserError: an endpoint is named, and OpenTelemetry is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in TRACES_VARIABLES):
        return LocalTracer()
    try:
        return OtlpTracer(endpoint)
    except ImportError as error:
        raise UserError(f"traces need OpenTelemetry ({error}): {install_line('traces')}") from None


@dataclass(frozen=True, slots=True)
class _LocalSpan:
    context: TraceContext
    recording = False

    def start_child(self, name: str, *, client: bool = False, began: float | None = None) -> Span:  # noqa: ARG002
        return self

    def add_event(self, name: str, at: float) -> None:
        """Nothing is kept."""

    def end(
        self, attributes: Mapping[str, Any], *, error: str | None = None, ended: float | None = None
    ) -> None:
        """Nothing is kept."""


class LocalTracer:
    """Spans that have ids and are exported nowhere."""

    def start_span(self, name: str, parent: TraceContext | None) -> Span:  # noqa: ARG002
        own = random_hex(16)
        if parent is None:
            return _LocalSpan(TraceContext(random_hex(32), own, 0))
        return _LocalSpan(TraceContext(parent.trace_id, own, parent.flags))

    def close(self) -> None:
        """There is nothing to export."""


class _Clock:
    """Times by `time.perf_counter()` in nanoseconds since the epoch; one for a request, so that their order is kept."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def epoch_ns(self, at: float | None) -> int:
        """Convert a time; None is now."""
        return self._offset_ns + round((time.perf_counter() if at is None else at) * 1e9)


class _OtlpSpan:
    def __init__(self, span: Any, tracer: Any, clock: _Clock) -> None:
        self._span, self._tracer, self._clock, own = span, tracer, clock, span.get_span_context()
        self.context = TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}", int(own.trace_flags))

    @property
    def recording(self) -> bool:
        found: bool = self._span.is_recording()
        return found

    def start_child(self, name: str, *, client: bool = False, began: float | None = None) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        context = set_span_in_context(self._span)
        began_ns = self._clock.epoch_ns(began)
        span = self._tracer.start_span(name, context=context, kind=kind, start_time=began_ns)
        return _OtlpSpan(span, self._tracer, self._clock)

    def add_event(self, name: str, at: float) -> None:
        self._span.add_event(name, timestamp=self._clock.epoch_ns(at))

    def end(
        self, attributes: Mapping[str, Any], *, error: str | None = None, ended: float | None = None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._clock.epoch_ns(ended))


class OtlpTracer:
    """Exports spans in batches, from a thread of its own; those that cannot be delivered are dropped."""

    def __init__(self, endpoint: str | None) -> None:
        """
        Args:
            endpoint: http://host:port of the receiver; None takes that of OpenTelemetry's environment variables.

        Raises:
            ImportError: OpenTelemetry is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": _SERVICE_NAME}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("pipeline.gateway")

    def start_span(self, name: str, parent: TraceContext | None) -> Span:
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            SpanKind,
            TraceFlags,
            set_span_in_context,
        )

        context = None
        if parent is not None:
            trace_id, span_id = int(parent.trace_id, 16), int(parent.span_id, 16)
            flags = TraceFlags(parent.flags)
            context = set_span_in_context(
                NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
            )
        clock = _Clock()
        span = self._tracer.start_span(
            name, context=context, kind=SpanKind.SERVER, start_time=clock.epoch_ns(None)
        )
        return _OtlpSpan(span, self._tracer, clock)

    def close(self) -> None:
        """Export what has not been exported yet."""
        self._provider.shutdown()
