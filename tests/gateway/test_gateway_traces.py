"""Request ids, traces and the log: what ties a request to its answer, to Triton's spans, and to a line."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import NonRecordingSpan, NoOpTracer, SpanContext, TraceFlags

from pipeline.cache.redaction import Redaction
from pipeline.client.testing import Ending, Reply
from pipeline.errors import UserError
from pipeline.gateway.access_log import LOG_FIELDS, JsonFormatter
from pipeline.gateway.records import PromptLog
from pipeline.gateway.settings import TRACES_VARIABLES
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.traces import Span, Tracer, make_tracer, parse_traceparent
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http
from tests.support.otlp import Receiver, receiving
from tests.support.waiting import wait_for

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRACES_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def ask(running: Running, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    url = f"{running.url}/v1/chat/completions"
    return http.post(url, json={**BODY, **fields}, headers=headers, timeout=20)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_header_is_read_as_it_is_written(trace_id: int, span_id: int, flags: int) -> None:
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    span = Span(NonRecordingSpan(context), NoOpTracer(), 0)
    assert parse_traceparent(span.traceparent()) == context


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
    assert parse_traceparent(header) is None
    assert Tracer().start_span("x", None).context.trace_flags == 0


@pytest.mark.parametrize(("stream", "cached"), [(False, True), (True, False)])
def test_a_trace_goes_on_to_triton_and_back(start: Start, *, stream: bool, cached: bool) -> None:
    running = start(cached=cached)
    headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "mine-1"}
    answer = ask(running, headers, stream=stream, temperature=0)
    traceparent = answer.headers["traceparent"]
    assert parse_traceparent(traceparent) is not None
    assert traceparent[:36] == PARENT[:36]
    assert traceparent[36:52] != PARENT[36:52]
    upstream = running.upstream.requests[0]
    assert upstream.headers["traceparent"] == traceparent
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
def test_a_long_state_of_a_trace_is_shortened(borrow: Start, states: list[str], goes_on: str | None) -> None:
    """As W3C Trace Context says: what has more than 128 characters goes first, then what comes last."""
    running = borrow()
    headers = [("traceparent", PARENT), *(("tracestate", state) for state in states)]
    url = f"{running.url}/v1/chat/completions"
    assert http.post(url, json=BODY, headers=headers, timeout=20).status_code == 200
    assert running.upstream.requests[0].headers.get("tracestate") == goes_on


def test_an_id_that_is_none_and_a_state_without_a_trace_are_replaced(borrow: Start) -> None:
    running = borrow()
    answer = ask(running, {"x-request-id": "two words", "tracestate": "a=1"})
    assert len(answer.headers["x-request-id"]) == 32
    assert "tracestate" not in running.upstream.requests[0].headers


def test_errors_tell_the_id(borrow: Start) -> None:
    running = borrow(Reply(["a"], ending=Ending.ERROR, error="it broke"))
    for answer in (ask(running), ask(running, model="other")):
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    streamed = ask(running, stream=True)
    last = [line for line in streamed.text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["request_id"] == streamed.headers["x-request-id"]


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """Lines of requests in the JSON log."""

    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "pipeline.gateway"]

    wait_for(lambda: len(found()) >= count, f"{count} lines")
    return [json.loads(JsonFormatter().format(record)) for record in found()]


def test_each_request_leaves_a_line(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    running = start(Reply(["a", "b"]))
    with caplog.at_level(logging.INFO, "pipeline.gateway"):
        ask(running, {"x-request-id": "mine", "traceparent": PARENT})
        ask(running, temperature=9)
        with socket.create_connection(("127.0.0.1", running.server.port)) as client:
            client.sendall(b"no HTTP\r\n\r\n")
            client.recv(100)
        first, second, third = lines(caplog, 3)
    for line in (first, second, third):
        assert list(line) == list(LOG_FIELDS)
        assert (line["level"], line["logger"]) == ("INFO", "pipeline.gateway")
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert (first["request_id"], first["trace_id"], first["status"]) == ("mine", PARENT[3:35], 200)
    assert (first["method"], first["path"]) == ("POST", "/v1/chat/completions")
    assert (first["model"], first["tenant"], first["stream"], first["cached"]) == ("tiny", "", False, None)
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reasons"]) == (2, 2, ["stop"])
    assert first["ms"] >= first["ttft_ms"] >= first["queue_ms"] >= 0
    assert first["tpot_ms"] >= 0
    assert (second["status"], second["outcome"], second["traceback"]) == (400, 400, None)
    assert "temperature" in second["error"]
    assert (third["status"], third["path"]) == (400, None)
    texts = [message for message in caplog.messages if message.startswith("request_id=")]
    assert texts[0].startswith(f"request_id=mine trace_id={PARENT[3:35]} ")
    assert " status=200 " in texts[0]
    assert texts[1].endswith(f" error={json.dumps(second['error'])}")


def test_what_the_server_fails_by_is_in_the_log_and_not_in_the_answer(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start([Reply(["a"], ending=Ending.ERROR, error="it broke"), Reply(["a"])])
    with caplog.at_level(logging.INFO, "pipeline.gateway"):
        ask(running, stream=True)
        monkeypatch.setattr(Tenants, "authenticate", lambda *_: 1 / 0)
        answer = ask(running, {"x-request-id": "mine"})
        # This one is not a route of its own.
        other = http.get(f"{running.url}/v1/models")
        failed, bug, another = lines(caplog, 3)
    assert (failed["level"], failed["status"], failed["outcome"]) == ("ERROR", 200, 502)
    assert (failed["error_type"], "it broke" in failed["error"]) == ("upstream_error", True)
    assert failed["finish_reasons"] == [None]
    assert "ServerFailed" in failed["traceback"]
    assert answer.status_code == 500
    assert (answer.json()["error"]["code"], answer.json()["error"]["request_id"]) == (
        "internal_error",
        "mine",
    )
    assert "division" not in answer.text + other.text
    assert (other.status_code, other.json()["error"]["code"]) == (500, "internal_error")
    assert (another["outcome"], another["error_type"]) == (500, "ZeroDivisionError")
    assert (bug["outcome"], bug["error_type"], bug["error"]) == (500, "ZeroDivisionError", "division by zero")
    assert "test_gateway_traces.py" in bug["traceback"]


def test_prompts_are_logged_only_if_asked(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("phonenumbers")
    secret = "Write to ada@example.org"
    for prompt_log in (None, PromptLog(None), PromptLog(Redaction())):
        running = start([Reply(["a", "b"]), Reply([secret])], prompt_log=prompt_log)
        caplog.clear()
        with caplog.at_level(logging.INFO, "pipeline.gateway"):
            ask(running)
            ask(running, messages=[{"role": "user", "content": secret}], stream=True)
            first, second = lines(caplog, 2)
        if prompt_log is None:
            assert list(first) == list(second) == list(LOG_FIELDS)
        else:
            assert (first["prompts"], first["answers"]) == (["user: Hi\n"], ["ab"])
    held = ["[left out: holds e-mail]"]
    assert (second["prompts"], second["answers"]) == (held, held)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def test_spans_are_exported(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline.gateway")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    exported = make_tracer(None)
    running = start(Reply(["a", "b"]), tracer=exported, cached=True)
    answer = ask(running, {"traceparent": PARENT}, stream=True, temperature=0, max_tokens=7)
    # The line of a request comes after its spans.
    lines(caplog, 1)
    exported.close()
    request, queue, lookup, call = (
        receiver.named(name) for name in ("POST /v1/chat/completions", "queue", "cache lookup", "chat tiny")
    )
    assert {span.trace_id for span in receiver.spans} == {PARENT[3:35]}
    assert (request.parent_id, request.kind, request.status) == (PARENT[36:52], "SERVER", "UNSET")
    assert request.span_id == answer.headers["traceparent"][36:52]
    # Triton's spans come below that of the call.
    assert call.span_id == running.upstream.requests[0].headers["traceparent"][36:52]
    assert {(span.parent_id, span.kind) for span in (queue, lookup)} == {(request.span_id, "INTERNAL")}
    assert (call.parent_id, call.kind, call.events) == (request.span_id, "CLIENT", ["first_token"])
    assert request.start_ns <= queue.start_ns <= queue.end_ns <= lookup.start_ns
    assert lookup.end_ns <= call.end_ns <= request.end_ns
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nvidia.triton",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["stop"],
        "pipeline.model": "tiny",
    }
    assert request.attributes.items() >= expected.items()
    assert call.attributes["server.port"] == running.upstream.port
    assert call.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert lookup.attributes == {"pipeline.cache": "miss"}


def test_only_the_servers_own_errors_are_errors_of_its_spans(
    start: Start, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline.gateway")
    exported = make_tracer(receiver.url)
    running = start(
        [Reply(["a"], ending=Ending.ERROR, error="it broke"), Reply(["a"])], tracer=exported, cached=True
    )
    ask(running, temperature=9)
    ask(running, stream=True, temperature=0)
    for _ in range(2):
        ask(running, temperature=0)
    http.get(f"{running.url}/not/a/route")
    lines(caplog, 5)
    exported.close()
    refused, failed, first, hit = (
        span for span in receiver.spans if span.name == "POST /v1/chat/completions"
    )
    assert (refused.status, refused.attributes["http.response.status_code"]) == ("UNSET", 400)
    assert "error.type" not in refused.attributes
    # Its header said 200.
    assert (failed.status, failed.attributes["error.type"]) == ("ERROR", "502")
    broken = next(
        span for span in receiver.spans if span.parent_id == failed.span_id and span.kind == "CLIENT"
    )
    assert (broken.status, broken.attributes["error.type"]) == ("ERROR", "upstream_error")
    assert (first.status, hit.status) == ("UNSET", "UNSET")
    # What the cache answered has no call of Triton.
    below = [span for span in receiver.spans if span.parent_id == hit.span_id]
    assert {span.name for span in below} == {"queue", "cache lookup"}
    assert {"pipeline.cache": "exact"} in [span.attributes for span in below]
    assert receiver.named("GET").attributes["http.response.status_code"] == 404


def test_without_opentelemetry_an_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(UserError, match=r"need OpenTelemetry.*pip install .*\[traces\]'"):
        make_tracer("http://127.0.0.1:1")
    assert not make_tracer(None).start_span("x", None).recording
