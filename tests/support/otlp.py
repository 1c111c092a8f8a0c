"""An OTLP receiver: takes spans over HTTP, as protobuf (OpenTelemetry for Python) and as JSON (Triton's, in C++)."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class ReceivedSpan:
    """One span; ids are hex digits, kinds and status codes are OTLP's names."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    status: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)


_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_STATUSES = ("UNSET", "OK", "ERROR")


class Receiver:
    """What was received, at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[ReceivedSpan] = []

    def take(self, request: Mapping[str, Any]) -> None:
        """Take in an ExportTraceServiceRequest, in OTLP's form of JSON."""
        for resource in request["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                self.spans += map(_span, scope["spans"])

    def named(self, name: str) -> ReceivedSpan:
        """The only span of a name."""
        (found,) = (span for span in self.spans if span.name == name)
        return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port. Skips the test where OpenTelemetry is not installed."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            if self.headers["content-type"] == "application/json":
                receiver.take(json.loads(body))
            else:
                receiver.take(MessageToDict(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _span(found: Mapping[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=found["name"],
        trace_id=_id(found["traceId"]),
        span_id=_id(found["spanId"]),
        parent_id=_id(found.get("parentSpanId", "")),
        kind=_name(found.get("kind", 0), _KINDS),
        status=_name(found.get("status", {}).get("code", 0), _STATUSES),
        start_ns=int(found["startTimeUnixNano"]),
        end_ns=int(found["endTimeUnixNano"]),
        attributes={
            attribute["key"]: _value(attribute["value"]) for attribute in found.get("attributes", ())
        },
        events=[event["name"] for event in found.get("events", ())],
    )


def _id(text: str) -> str:
    """OTLP writes ids as hex digits; protobuf's own form of JSON has them in base64."""
    import base64

    return text if len(text) in (0, 16, 32) else base64.b64decode(text).hex()


def _name(value: int | str, names: tuple[str, ...]) -> str:
    return names[value] if isinstance(value, int) else value.rpartition("_")[2]


def _value(value: Mapping[str, Any]) -> Any:
    ((kind, inner),) = value.items()
    if kind == "intValue":
        return int(inner)
    return [_value(value) for value in inner.get("values", ())] if kind == "arrayValue" else inner
