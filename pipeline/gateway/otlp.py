"""Spans by OpenTelemetry's SDK 1.30 and newer, exported over HTTP (OTLP 1, protobuf)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from pipeline.gateway.traces import Trace

_SERVICE = "pipeline-gateway"  # unless OTEL_SERVICE_NAME says otherwise


class Otlp:
    """Sends spans in batches, from a thread of its own; those that cannot be delivered are dropped."""

    def __init__(self, endpoint: str | None) -> None:
        """`endpoint`: http://host:port of the receiver; None takes what OpenTelemetry's environment says."""
        url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": _SERVICE}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("pipeline.gateway")

    def begin(self, name: str, parent: Trace | None) -> _Recorded:
        context = None
        if parent is not None:
            above = SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(parent.flags),
            )
            context = set_span_in_context(NonRecordingSpan(above))
        return _Recorded(self._tracer.start_span(name, context=context, kind=SpanKind.SERVER))

    def close(self) -> None:
        self._provider.shutdown()


class _Recorded:
    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace = Trace(f"{context.trace_id:032x}", f"{context.span_id:016x}", int(context.trace_flags))

    def end(self, attributes: Mapping[str, Any], error: str | None) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()
