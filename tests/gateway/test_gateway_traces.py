"""Request ids, traces and the log: what ties a request to its answer, to Triton's spans, and to a line."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client.testing import Ending, Reply
from pipeline.errors import UserError
from pipeline.gateway.traces import ENDPOINT_VARIABLES, LocalTracer, TraceContext, make_tracer
from tests.gateway.conftest import Running, Start
from tests.support.waiting import wait_for

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPAN = st.text("0123456789abcdef", min_size=16, max_size=16).filter(lambda text: set(text) != {"0"})


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def ask(running: Running, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    url = f"{running.url}/v1/chat/completions"
    return httpx.post(url, json={**BODY, **fields}, headers=headers, timeout=20, trust_env=False)


@given(st.builds("".join, st.tuples(SPAN, SPAN)), SPAN, st.integers(0, 255))
def test_a_header_is_read_as_it_is_written(trace_id: str, span_id: str, flags: int) -> None:
    trace = TraceContext(trace_id, span_id, flags)
    assert TraceContext.parse(trace.traceparent()) == trace


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00-1-2-01",
        PARENT.upper(),
        PARENT.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
    ],
)
def test_what_is_no_header_begins_a_trace(header: str | None) -> None:
    assert TraceContext.parse(header) is None
    assert LocalTracer().start_span("x", TraceContext.parse(header)).context.flags == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_trace_goes_on_to_triton_and_back(start: Start, *, stream: bool, cached: bool) -> None:
    running = start(cached=cached)
    headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "mine-1"}
    answer = ask(running, headers, stream=stream, temperature=0)
    told = TraceContext.parse(answer.headers["traceparent"])
    assert told is not None
    assert told.trace_id == PARENT[3:35]
    assert told.span_id != PARENT[36:52]
    upstream = running.upstream.requests[0]
    assert upstream.headers["traceparent"] == told.traceparent()
    assert upstream.headers["tracestate"] == "vendor=1"
    assert (answer.headers["x-request-id"], upstream.request_id) == ("mine-1", "mine-1")
    assert answer.headers["x-cache"] == "miss"


@pytest.mark.parametrize(
    ("states", "goes_on"),
    [
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=" + "x" * 20_000], None),
        ([f"k{number}=" + "x" * 50 for number in range(40)], ",".join(f"k{n}=" + "x" * 50 for n in range(9))),
        (["a=1," + "b=" + "x" * 600 + ",c=3"], "a=1,c=3"),
    ],
)
def test_a_long_state_of_a_trace_is_shortened(start: Start, states: list[str], goes_on: str | None) -> None:
    """As W3C Trace Context says: what has more than 128 characters goes first, then what comes last."""
    running = start()
    headers = [("traceparent", PARENT), *(("tracestate", state) for state in states)]
    url = f"{running.url}/v1/chat/completions"
    assert httpx.post(url, json=BODY, headers=headers, timeout=20, trust_env=False).status_code == 200
    assert running.upstream.requests[0].headers.get("tracestate") == goes_on


def test_a_state_without_a_trace_is_none(start: Start) -> None:
    running = start()
    assert ask(running, {"tracestate": "a=1"}).status_code == 200
    assert "tracestate" not in running.upstream.requests[0].headers


def test_an_id_that_is_none_is_replaced(start: Start) -> None:
    answer = ask(start(), {"x-request-id": "two words"})
    assert len(answer.headers["x-request-id"]) == 32


def test_errors_tell_the_id(start: Start) -> None:
    running = start(Reply(["a"], ending=Ending.ERROR, error="it broke"))
    for answer in (ask(running), ask(running, model="other")):
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    streamed = ask(running, stream=True)
    last = [line for line in streamed.text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["request_id"] == streamed.headers["x-request-id"]


@pytest.mark.parametrize("as_json", [True, False])
def test_each_request_leaves_a_line(start: Start, caplog: pytest.LogCaptureFixture, *, as_json: bool) -> None:
    running = start(Reply(["a", "b"]), log_as_json=as_json)
    with caplog.at_level(logging.INFO, "pipeline.gateway"):
        ask(running, {"x-request-id": "mine", "traceparent": PARENT})
        ask(running, temperature=9)
        wait_for(lambda: len(caplog.messages) == 2, "two lines")
    if as_json:
        first, second = map(json.loads, caplog.messages)
    else:
        first, second = (dict(pair.split("=", 1) for pair in line.split(" ", 5)) for line in caplog.messages)
    assert (first["request_id"], first["trace_id"], str(first["status"])) == ("mine", PARENT[3:35], "200")
    assert str(second["status"]) == "400"
    if as_json:
        assert (first["model"], first["completion_tokens"], first["cached"]) == ("tiny", 2, None)
        assert "temperature" in second["error"]


class Receiver:
    """What an OTLP receiver gets over HTTP, as protobuf."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        received = self.spans = []  # type: ignore[var-annotated]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        received.extend(scope.spans)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()
    thread.join(10)


@pytest.mark.parametrize("by_environment", [True, False])
def test_spans_are_exported(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, *, by_environment: bool
) -> None:
    if by_environment:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    exported = make_tracer(None if by_environment else receiver.url)
    running = start(Reply(["a", "b"]), tracer=exported)
    answer = ask(running, {"traceparent": PARENT}, stream=True)
    ask(running, temperature=9)
    exported.close()
    first, second = receiver.spans
    assert first.name == "POST /v1/chat/completions"
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    told = TraceContext.parse(answer.headers["traceparent"])
    assert told is not None
    assert first.span_id.hex() == told.span_id
    attributes = {one.key: one.value for one in first.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["pipeline.model"].string_value == "tiny"
    assert attributes["pipeline.completion_tokens"].int_value == 2
    assert second.status.message.startswith("temperature")
    assert second.parent_span_id == b""


def test_without_opentelemetry_an_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(UserError, match=r"need OpenTelemetry.*pip install .*\[traces\]'"):
        make_tracer("http://127.0.0.1:1")
    assert isinstance(make_tracer(None), LocalTracer)
