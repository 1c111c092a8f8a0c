"""The client against the fake server: chunks, figures, deadlines, cancellation, errors; its two faces alike."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pipeline.client import (
    BetweenTokensDeadline,
    Cancelled,
    ChatTemplate,
    Client,
    ClientError,
    ConnectFailed,
    FirstTokenDeadline,
    KeepAlive,
    ModelNotFound,
    PromptLogProbs,
    Refused,
    Retries,
    ServerFailed,
    ServerLost,
    Timeouts,
    request_headers,
)
from pipeline.client.endpoints import channel_options
from pipeline.client.testing import Ending, FakeServer, Received, Reply, bls
from tests.support.client_faces import both_faces, status_of

Face = Callable[..., Any]
SLOW = Reply(["a"] * 1000, delay_s=0.01)


@both_faces
def test_a_stream(face: Face) -> None:
    reply = Reply(
        ["Hel", "lo"],
        delay_s=0.05,
        tokens_per_chunk=2,
        log_probs=[-1, -2, -3, -4],
        draft_tokens=4,
        accepted_tokens=3,
    )
    with FakeServer(reply) as server, face(server.url) as client:
        with client.stream("Hi", max_tokens=8, log_probs=True, request_id="mine") as stream:
            chunks = list(stream)
        assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
        assert [chunk.log_probs for chunk in chunks] == [(-1, -2), (-3, -4), None]
        assert chunks[-1].finish_reason == stream.finish_reason == "stop"
        assert stream.text == "Hello"
        stats = stream.stats
        assert (stats.chunks, stats.input_tokens, stats.output_tokens) == (2, 5, 4)
        assert stats.acceptance == 0.75
        assert 0 < stats.ttft_ms < stats.total_ms
        assert stats.ttft_ms + stats.itl_ms[0] > 45  # a busy machine may hand over both at once
        (request,) = server.requests
        assert (request.request_id, request.prompt) == ("mine", "Hi")
        assert request.finished.wait(5)
        assert not request.cancelled.is_set()


@both_faces
def test_a_whole_answer_with_the_ids_that_a_model_returns_unasked(face: Face) -> None:
    reply, model = Reply(token_ids=[7, 8]), bls(token_ids=True)
    with FakeServer(reply, model=model) as server, face(server.url) as client:
        signature = client.model()
        answer = client.generate("Hi", max_tokens=2)
        assert client.model() is signature, "the model is asked for once"
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("Hello world", "length", (7, 8))
    assert answer.request_id == server.requests[0].request_id


def test_token_ids_come_where_they_are_asked_for() -> None:
    with FakeServer(Reply(token_ids=[7, 8])) as server, Client(server.url) as client:
        assert client.generate("Hi", max_tokens=2).token_ids is None
        assert client.generate("Hi", max_tokens=2, token_ids=True).token_ids == (7, 8)


def test_token_ids_go_out_as_they_are() -> None:
    with FakeServer() as server, Client(server.url) as client:
        client.generate([1, 15043, 1], max_tokens=2)
        for prompt in ([1, -2], [1, True], [2**31]):
            with pytest.raises(Refused, match="token ids"):
                client.generate(prompt, max_tokens=2)
        with pytest.raises(Refused, match="tools need messages"):
            client.generate([1, 2], max_tokens=2, tools=[{"type": "function"}])
    (request,) = server.requests
    assert (request.prompt, request.tensors["prompt_token_ids"]) == ("", [1, 15043, 1])
    refused = pytest.raises(Refused, match="does not take a prompt as token ids")
    with FakeServer(model=bls(upstream=True)) as server, Client(server.url) as client, refused:
        client.generate([1, 2], max_tokens=2)


def test_log_probabilities_of_the_prompt_come_with_the_first_chunk() -> None:
    prompt = PromptLogProbs(
        (1, 5, 9), (None, -0.5, -1.5), ((), ((5, -0.5), (6, -0.75)), ((8, -0.25), (9, -1.5)))
    )
    with FakeServer(Reply(["", "lo"], prompt_log_probs=prompt)) as server, Client(server.url) as client:
        with client.stream([1, 5, 9], max_tokens=8, prompt_log_probs=2) as stream:
            chunks = list(stream)
        assert [chunk.prompt_log_probs for chunk in chunks] == [prompt, None, None]
        assert stream.answer().prompt_log_probs == prompt
        assert server.requests[0].tensors["return_prompt_log_probs"] == [2]
        assert client.generate("Hi", max_tokens=8).prompt_log_probs is None


@both_faces
def test_template_defaults_and_headers(face: Face) -> None:
    settings: dict[str, Any] = {
        "template": ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"),
        "defaults": {"max_tokens": 9, "top_k": 4},
        "headers": {"x-tenant": "a"},
    }
    with FakeServer() as server, face(server.url, **settings) as client:
        token = request_headers.set((("traceparent", "00-1-2-01"),))
        client.generate([{"role": "user", "content": "Hi"}], top_k=5)
        request_headers.reset(token)
    (request,) = server.requests
    assert request.prompt == "[user]Hi"
    assert (request.tensors["max_tokens"], request.tensors["top_k"]) == ([9], [5])
    assert (request.headers["x-tenant"], request.headers["traceparent"]) == ("a", "00-1-2-01")


@both_faces
@pytest.mark.parametrize("cancel", [False, True])
def test_an_answer_that_is_left_ends_in_order(face: Face, cancel: bool) -> None:
    """A cancelled call can end Triton 24.10; so the server is asked to end the answer, and the call ends by itself."""
    with FakeServer(SLOW) as server, face(server.url) as client:
        with client.stream("Hi", max_tokens=1000) as stream:
            next(stream)
            if cancel:
                stream.cancel()
                with pytest.raises(Cancelled):
                    list(stream)
        assert server.requests[0].stopped.is_set()
        assert status_of(stream) is grpc.StatusCode.OK
        assert not server.requests[0].finished.is_set()
        assert len(server.requests) == 1
        if isinstance(client, Client):
            assert not client._deadlines._streams


@both_faces
@pytest.mark.parametrize("cancel", [False, True])
def test_a_server_that_does_not_end_an_answer_has_its_call_cancelled(face: Face, cancel: bool) -> None:
    with FakeServer(Reply(ending=Ending.HANG)) as server, face(server.url) as client:
        with client.stream("Hi", max_tokens=8) as stream:
            next(stream)
            server._open.clear()
            if cancel:
                threading.Timer(0.1, stream.cancel).start()
                with pytest.raises(Cancelled):
                    list(stream)
        assert status_of(stream) is grpc.StatusCode.CANCELLED
        assert server.requests[0].cancelled.wait(30)


@both_faces
def test_cancel_wakes_the_reader(face: Face) -> None:
    with FakeServer(Reply(ending=Ending.HANG)) as server, face(server.url) as client:
        with client.stream("Hi", max_tokens=8) as stream:
            while stream.text != "Hello world":
                next(stream)
            threading.Timer(0.1, stream.cancel).start()
            with pytest.raises(Cancelled, match="the answer was cancelled"):
                list(stream)
        assert server.requests[0].cancelled.wait(5)


@both_faces
def test_a_late_first_token(face: Face) -> None:
    timeouts = Timeouts(first_token_s=0.3)
    with FakeServer(Reply(first_delay_s=300)) as server, face(server.url, timeouts=timeouts) as client:
        with pytest.raises(FirstTokenDeadline, match=r"no first token within 0\.3 s"):
            client.generate("Hi", max_tokens=8)
        assert server.requests[0].cancelled.wait(5)


@both_faces
def test_a_stall_between_tokens(face: Face) -> None:
    """The short deadline comes after a long one."""
    timeouts = Timeouts(first_token_s=60, between_tokens_s=0.1)
    with FakeServer(Reply(ending=Ending.HANG)) as server, face(server.url, timeouts=timeouts) as client:
        with client.stream("Hi", max_tokens=8) as stream:
            with pytest.raises(BetweenTokensDeadline) as caught:
                list(stream)
            assert stream.text
        assert caught.value.request_id == stream.request_id
        assert server.requests[0].cancelled.wait(5)


@both_faces
def test_the_readers_own_time_is_not_the_servers(face: Face) -> None:
    timeouts = Timeouts(between_tokens_s=0.5)
    with (
        FakeServer() as server,
        face(server.url, timeouts=timeouts) as client,
        client.stream("Hi", max_tokens=8) as stream,
    ):
        next(stream)
        assert server.requests[0].finished.wait(5)
        time.sleep(0.7)
        assert [chunk.text for chunk in stream] == [" world", ""]


@both_faces
def test_no_deadline_at_all(face: Face) -> None:
    timeouts = Timeouts(connect_s=None, first_token_s=None, between_tokens_s=None)
    with FakeServer() as server, face(server.url, timeouts=timeouts) as client:
        assert client.generate("Hi", max_tokens=8).text == "Hello world"


@both_faces
@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (Reply(ending=Ending.ERROR, error="bad\nAt:\n x"), ServerFailed, "bad"),
        (Reply([], ending=Ending.ERROR, error="top_p = 2: at most 1"), Refused, "top_p = 2: at most 1"),
        (Reply(ending=Ending.ERROR, error="the request was cancelled"), Cancelled, "the request was"),
        (
            Reply(ending=Ending.LOST),
            ServerFailed,
            "the server was lost in the middle of the answer: Socket closed",
        ),
        (Reply([], ending=Ending.LOST), ConnectFailed, "no answer from 127.0.0.1:"),
        (Reply(ending=Ending.UNMARKED), ServerLost, "the answer broke off"),
    ],
)
def test_errors_of_the_server(face: Face, reply: Reply, kind: type[ClientError], message: str) -> None:
    with (
        FakeServer(reply) as server,
        face(server.url, retries=Retries(attempts=1)) as client,
        client.stream("Hi", max_tokens=8) as stream,
    ):
        with pytest.raises(kind) as caught:
            list(stream)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert caught.value.request_id == stream.request_id
        assert stream.stats.total_ms is not None


@both_faces
def test_a_server_that_is_not_there_says_nothing_or_has_no_such_model(face: Face) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        with face(url, timeouts=Timeouts(connect_s=0.2)) as client, pytest.raises(ConnectFailed):
            client.generate("Hi", max_tokens=8)
    with face(url) as client, pytest.raises(ConnectFailed, match=url):
        client.generate("Hi", max_tokens=8)
    not_found = pytest.raises(ModelNotFound, match="'nope' is not found")
    with FakeServer() as server, face(server.url, model="nope") as client, not_found:
        client.generate("Hi", max_tokens=8)


@both_faces
def test_a_server_that_goes_away_in_the_middle_and_comes_back(face: Face) -> None:
    with FakeServer(SLOW) as server, face(server.url, retries=Retries(attempts=1)) as client:
        with client.stream("Hi", max_tokens=1000) as stream:
            next(stream)
            server.stop()
            with pytest.raises((ServerFailed, Cancelled)):
                list(stream)
        with pytest.raises(ConnectFailed):
            client.generate("Hi", max_tokens=8)
        with FakeServer(port=server.port):
            until = time.monotonic() + 60
            while True:
                try:
                    assert client.generate("Hi", max_tokens=8).text == "Hello world"
                    break
                except ConnectFailed:  # gRPC waits before it connects again
                    assert time.monotonic() < until
                    time.sleep(0.1)


def test_a_server_process_that_is_killed_in_the_middle() -> None:
    script = (
        "import time\n"
        "from pipeline.client.testing import FakeServer, Reply\n"
        "with FakeServer(Reply(['a'] * 1000, delay_s=0.01)) as server:\n"
        "    print(server.url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with Client(url) as client, client.stream("Hi", max_tokens=1000) as stream:
            next(stream)
            process.kill()
            with pytest.raises(ServerFailed, match="lost in the middle of the answer"):
                list(stream)


def test_nothing_is_sent_when_the_request_is_refused() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    cases: list[tuple[Any, dict[str, Any]]] = [("Hi", {"top_q": 1}), ("", {}), ("Hi", {}), (messages, {})]
    with FakeServer() as server, Client(server.url) as client:
        for prompt, sampling in cases:
            with pytest.raises(Refused):
                client.generate(prompt, **sampling)
        assert server.requests == []
        assert [endpoint.outstanding for endpoint in client._pool.all] == [0]


@both_faces
def test_mistakes_in_the_use_of_a_stream(face: Face) -> None:
    with FakeServer() as server, face(server.url) as client:
        stream = client.stream("Hi", max_tokens=8)
        with pytest.raises(RuntimeError, match="`with` block"):
            next(stream)
        with stream, pytest.raises(RuntimeError, match="not complete"):
            stream.answer()
        with pytest.raises(RuntimeError, match="entered once"), stream:
            pass
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("Hi", max_tokens=8)


def test_settings_that_cannot_be_are_refused() -> None:
    for url in ("http://localhost:8000", "localhost", ":8001", ""):
        with pytest.raises(Refused, match="gRPC service"):
            Client(url)
    for name, value in (("Upper", "x"), ("a b", "x"), ("line", "x\r\ny"), ("line", "ü"), ("text-bin", "x")):
        with pytest.raises(Refused, match="cannot be sent"):
            Client("localhost:8001", headers={name: value})
    with pytest.raises(ValueError, match="between_tokens_s = 0"):
        Timeouts(between_tokens_s=0)
    options = dict(channel_options(KeepAlive(time_s=60, while_idle=True)))
    assert options["grpc.keepalive_time_ms"] == 60_000
    assert options["grpc.keepalive_permit_without_calls"] == 1


@both_faces
def test_closing_the_client_ends_its_streams(face: Face) -> None:
    with FakeServer(SLOW) as server, face(server.url) as client:
        with client.stream("Hi", max_tokens=1000) as stream:
            next(stream)
            client.close()
            with pytest.raises(Cancelled):
                list(stream)
        assert server.requests[0].cancelled.wait(5)


def test_32_threads_share_a_connection() -> None:
    def script(received: Received) -> Reply:
        return Reply([f"{received.prompt}:{index} " for index in range(20)], delay_s=0.005)

    texts: dict[str, str] = {}
    with FakeServer(script) as server, Client(server.url) as client:

        def ask(name: str) -> None:
            texts[name] = client.generate(name, max_tokens=100).text

        threads = [threading.Thread(target=ask, args=(f"t{number}",)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert texts == {f"t{n}": "".join(f"t{n}:{index} " for index in range(20)) for n in range(32)}
