"""The blocking client against the fake server: chunks, figures, deadlines, cancellation, errors."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

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
    PartialAnswer,
    PromptLogProbs,
    Refused,
    ServerFailed,
    ServerLost,
    Timeouts,
    request_headers,
)
from pipeline.client.testing import Ending, FakeServer, Received, Reply, bls

SLOW = Reply(["a"] * 1000, delay_s=0.01)


def test_a_stream() -> None:
    reply = Reply(
        ["Hel", "lo"],
        delay_s=0.05,
        tokens_per_chunk=2,
        log_probs=[-1, -2, -3, -4],
        draft_tokens=4,
        accepted_tokens=3,
    )
    with FakeServer(reply) as server, Client(server.url) as client:
        with client.stream("Hi", max_tokens=8, log_probs=True, request_id="mine") as stream:
            chunks = list(stream)
        assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
        assert [chunk.log_probs for chunk in chunks] == [(-1, -2), (-3, -4), None]
        assert chunks[-1].finish_reason == stream.finish_reason == "stop"
        assert stream.text == "Hello"
        stats = stream.stats
        assert (stats.chunks, stats.input_tokens, stats.output_tokens) == (2, 5, 4)
        assert stats.acceptance == 0.75
        assert stats.ttft_ms is not None
        assert stats.total_ms is not None
        assert 0 < stats.ttft_ms < stats.total_ms
        assert stats.itl_ms[0] > 40
        (request,) = server.requests
        assert (request.request_id, request.prompt) == ("mine", "Hi")
        assert request.finished.wait(5)
        assert not request.cancelled.is_set()


def test_a_whole_answer() -> None:
    with (
        FakeServer(Reply(token_ids=[7, 8]), model=bls(token_ids=True)) as server,
        Client(server.url) as client,
    ):
        answer = client.generate("Hi", max_tokens=2)
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("Hello world", "length", (7, 8))
    assert answer.request_id == server.requests[0].request_id


def test_token_ids_come_where_they_are_asked_for() -> None:
    with FakeServer(Reply(token_ids=[7, 8])) as server, Client(server.url) as client:
        assert client.generate("Hi", max_tokens=2).token_ids is None
        assert client.generate("Hi", max_tokens=2, token_ids=True).token_ids == (7, 8)


@pytest.mark.parametrize("cumulative", [False, True])
def test_an_answer_goes_on_after_what_had_come(cumulative: bool) -> None:
    """Chunks are new ones; text, token ids, counts and the reason to end are those of the whole."""
    pieces = ("one ", "two ", "three")

    def script(received: Received) -> Reply:
        had = len(received.tensors.get("prior_output_ids", ()))
        if not had:
            return Reply(pieces[:2], token_ids=[7, 8], ending=Ending.LOST)
        # A model that repeats the text so far does so from the beginning of the answer.
        texts = ("".join(pieces),) if cumulative else pieces[had:]
        ids = range(7, 10) if cumulative else [9]
        return Reply(
            texts, token_ids=ids, tokens_per_chunk=len(ids) if cumulative else 1, input_tokens=5 + had
        )

    model = bls(cumulative=cumulative)
    with FakeServer(script, model=model) as server, Client(server.url) as client:
        with pytest.raises(ServerLost) as caught, client.stream("Hi", max_tokens=3, token_ids=True) as first:
            list(first)
        partial = caught.value.partial
        assert partial == PartialAnswer((7, 8), "one two ")
        with client.stream("Hi", max_tokens=3, token_ids=True, prior=partial) as rest:
            assert "".join(chunk.text for chunk in rest) == "three"
        answer = rest.answer()
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("one two three", (7, 8, 9), "length")
        if not cumulative:
            assert (answer.stats.input_tokens, answer.stats.output_tokens) == (5, 3)
        assert server.requests[1].tensors["prior_output_ids"] == [7, 8]


def test_what_had_come_is_known_only_with_its_tokens() -> None:
    lost = Reply(["one "], token_ids=[7], ending=Ending.LOST)
    with FakeServer(lost) as server, Client(server.url) as client, pytest.raises(ServerLost) as caught:
        client.generate("Hi", max_tokens=3)
    assert caught.value.partial is None
    with (
        FakeServer(model=bls(upstream=True)) as server,
        Client(server.url) as client,
        pytest.raises(Refused, match="does not go on with answers"),
        client.stream("Hi", max_tokens=3, prior=PartialAnswer((7,), "one ")) as stream,
    ):
        list(stream)


def test_the_model_is_asked_for_once() -> None:
    with FakeServer() as server, Client(server.url) as client:
        model = client.model()
        client.generate("Hi", max_tokens=2)
        assert client.model() is model


def test_messages_go_through_the_template() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    with FakeServer() as server, Client(server.url, template=template) as client:
        client.generate([{"role": "user", "content": "Hi"}], max_tokens=2)
    assert server.requests[0].prompt == "[user]Hi"


def test_token_ids_go_out_as_they_are() -> None:
    with FakeServer() as server, Client(server.url) as client:
        client.generate([1, 15043, 1], max_tokens=2)
        for prompt, problem in (([1, -2], "token ids"), ([1, True], "token ids"), ([2**31], "token ids")):
            with pytest.raises(Refused, match=problem):
                client.generate(prompt, max_tokens=2)
        with pytest.raises(Refused, match="tools need messages"):
            client.generate([1, 2], max_tokens=2, tools=[{"type": "function"}])
    (request,) = server.requests
    assert (request.prompt, request.tensors["prompt_token_ids"]) == ("", [1, 15043, 1])
    with (
        FakeServer(model=bls(upstream=True)) as server,
        Client(server.url) as client,
        pytest.raises(Refused, match="does not take a prompt as token ids"),
    ):
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


def test_defaults_and_headers() -> None:
    with FakeServer() as server:
        client = Client(server.url, defaults={"max_tokens": 9, "top_k": 4}, headers={"x-tenant": "a"})
        token = request_headers.set((("traceparent", "00-1-2-01"),))
        client.generate("Hi", top_k=5)
        request_headers.reset(token)
        client.close()
    assert server.requests[0].tensors["max_tokens"] == [9]
    assert server.requests[0].tensors["top_k"] == [5]
    headers = server.requests[0].headers
    assert (headers["x-tenant"], headers["traceparent"]) == ("a", "00-1-2-01")


@pytest.mark.parametrize("cancel", [False, True])
def test_an_answer_that_is_left_ends_in_order(cancel: bool) -> None:
    """A cancelled call can end Triton 24.10; so the server is asked to end the answer, and the call ends by itself."""
    with FakeServer(SLOW) as server, Client(server.url) as client:
        with client.stream("Hi", max_tokens=1000) as stream:
            next(stream)
            if cancel:
                stream.cancel()
                with pytest.raises(Cancelled):
                    next(stream)
        assert server.requests[0].stopped.is_set()
        assert stream._call.code() is grpc.StatusCode.OK
        assert not server.requests[0].finished.is_set()
        assert not client._deadlines._streams


@pytest.mark.parametrize("cancel", [False, True])
def test_a_server_that_does_not_end_an_answer_has_its_call_cancelled(cancel: bool) -> None:
    with FakeServer(Reply(ending=Ending.HANG)) as server, Client(server.url) as client:
        with client.stream("Hi", max_tokens=8) as stream:
            next(stream)
            server._open.clear()
            if cancel:
                threading.Timer(0.1, stream.cancel).start()
                with pytest.raises(Cancelled):
                    list(stream)
        assert stream._call.code() is grpc.StatusCode.CANCELLED
        assert server.requests[0].cancelled.wait(5)


def test_an_exception_in_the_block_cancels_too() -> None:
    with FakeServer(SLOW) as server, Client(server.url) as client:
        with pytest.raises(ZeroDivisionError), client.stream("Hi", max_tokens=1000) as stream:
            print(1 / len(next(stream).text.strip("a")))
        assert server.requests[0].cancelled.wait(5)


def test_cancel_from_another_thread_wakes_the_reader() -> None:
    with FakeServer(Reply(ending=Ending.HANG)) as server, Client(server.url) as client:
        with client.stream("Hi", max_tokens=8) as stream:
            while stream.text != "Hello world":
                next(stream)
            threading.Timer(0.1, stream.cancel).start()
            with pytest.raises(Cancelled):
                list(stream)
        assert server.requests[0].cancelled.wait(5)


def test_a_late_first_token() -> None:
    timeouts = Timeouts(first_token_s=0.1)
    with FakeServer(Reply(first_delay_s=30)) as server, Client(server.url, timeouts=timeouts) as client:
        start = time.monotonic()
        with pytest.raises(FirstTokenDeadline, match=r"no first token within 0\.1 s"):
            client.generate("Hi", max_tokens=8)
        assert time.monotonic() - start < 20
        assert server.requests[0].cancelled.wait(5)


def test_a_stall_between_tokens() -> None:
    timeouts = Timeouts(first_token_s=30, between_tokens_s=0.1)
    with FakeServer(Reply(ending=Ending.HANG)) as server, Client(server.url, timeouts=timeouts) as client:
        with client.stream("Hi", max_tokens=8) as stream:
            with pytest.raises(BetweenTokensDeadline) as caught:
                list(stream)
            assert stream.text == "Hello world"
        assert caught.value.request_id == stream.request_id
        assert server.requests[0].cancelled.wait(5)


def test_the_readers_own_time_is_not_the_servers() -> None:
    with FakeServer() as server:
        client = Client(server.url, timeouts=Timeouts(between_tokens_s=0.1))
        with client, client.stream("Hi", max_tokens=8) as stream:
            next(stream)
            time.sleep(0.3)
            assert [chunk.text for chunk in stream] == [" world", ""]


def test_steady_tokens_keep_a_short_deadline() -> None:
    timeouts = Timeouts(between_tokens_s=0.3)
    with (
        FakeServer(Reply(["a"] * 20, delay_s=0.03)) as server,
        Client(server.url, timeouts=timeouts) as client,
    ):
        assert client.generate("Hi", max_tokens=20).text == "a" * 20


def test_no_deadline_at_all() -> None:
    timeouts = Timeouts(connect_s=None, first_token_s=None, between_tokens_s=None)
    with FakeServer() as server, Client(server.url, timeouts=timeouts) as client:
        assert client.generate("Hi", max_tokens=8).text == "Hello world"


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
def test_errors_of_the_server(reply: Reply, kind: type[ClientError], message: str) -> None:
    with (
        FakeServer(reply) as server,
        Client(server.url) as client,
        client.stream("Hi", max_tokens=8) as stream,
    ):
        with pytest.raises(kind) as caught:
            list(stream)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert caught.value.request_id == stream.request_id
        assert stream.stats.total_ms is not None


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
    with Client(url) as client, pytest.raises(ConnectFailed, match=url):
        client.generate("Hi", max_tokens=8)


def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeouts=Timeouts(connect_s=0.2)) as client, pytest.raises(ConnectFailed):
            client.generate("Hi", max_tokens=8)


def test_no_such_model() -> None:
    not_found = pytest.raises(ModelNotFound, match="'nope' is not found")
    with FakeServer() as server, Client(server.url, model="nope") as client, not_found:
        client.generate("Hi", max_tokens=8)


def test_a_server_that_goes_away_in_the_middle() -> None:
    with FakeServer(SLOW) as server, Client(server.url) as client:
        with client.stream("Hi", max_tokens=1000) as stream:
            next(stream)
            server.stop()
            with pytest.raises((ServerFailed, Cancelled)):
                list(stream)
        with pytest.raises(ConnectFailed):
            client.generate("Hi", max_tokens=8)


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


def test_a_server_that_comes_back() -> None:
    with FakeServer() as server, Client(server.url) as client:
        client.generate("Hi", max_tokens=8)
        server.stop()
        with pytest.raises(ConnectFailed):
            client.generate("Hi", max_tokens=8)
        with FakeServer(port=server.port):
            until = time.monotonic() + 20
            while True:
                try:
                    assert client.generate("Hi", max_tokens=8).text == "Hello world"
                    break
                except ConnectFailed:  # gRPC waits before it connects again
                    assert time.monotonic() < until
                    time.sleep(0.1)


def test_nothing_is_sent_when_the_request_is_refused() -> None:
    with FakeServer() as server, Client(server.url) as client:
        for prompt, sampling in [
            ("Hi", {"top_q": 1}),
            ("", {}),
            ("Hi", {}),
            ([{"role": "user", "content": "Hi"}], {}),
        ]:
            with pytest.raises(Refused):
                client.generate(prompt, **sampling)  # type: ignore[arg-type]
        assert server.requests == []
        assert [endpoint.outstanding for endpoint in client._pool.all] == [0]


def test_mistakes_in_the_use_of_the_library() -> None:
    with FakeServer() as server:
        client = Client(server.url)
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
    for url in ("http://localhost:8000", "localhost", ":8001", ""):
        with pytest.raises(Refused, match="gRPC service"):
            Client(url)
    for name, value in (("Upper", "x"), ("a b", "x"), ("line", "x\r\ny"), ("line", "ü"), ("text-bin", "x")):
        with pytest.raises(Refused, match="cannot be sent"):
            Client(server.url, headers={name: value})
    with pytest.raises(ValueError, match="between_tokens_s = 0"):
        Timeouts(between_tokens_s=0)


def test_closing_the_client_ends_its_streams() -> None:
    with (
        FakeServer(SLOW) as server,
        Client(server.url) as client,
        client.stream("Hi", max_tokens=1000) as stream,
    ):
        next(stream)
        client.close()
        with pytest.raises(Cancelled):
            list(stream)


def test_keep_alive_reaches_the_channel() -> None:
    with (
        FakeServer() as server,
        Client(server.url, keep_alive=KeepAlive(time_s=60, while_idle=True)) as client,
    ):
        assert ("grpc.keepalive_time_ms", 60_000) in client._options
        assert ("grpc.keepalive_permit_without_calls", 1) in client._options
        assert client.generate("Hi", max_tokens=8).text == "Hello world"


def test_32_threads_share_a_connection() -> None:
    def script(received: object) -> Reply:
        return Reply([f"{received.prompt}:{index} " for index in range(20)], delay_s=0.005)  # type: ignore[attr-defined]

    texts: dict[str, str] = {}
    with FakeServer(script) as server, Client(server.url) as client:

        def ask(name: str) -> None:
            texts[name] = client.generate(name, max_tokens=100).text

        threads = [threading.Thread(target=ask, args=(f"t{number}",)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert texts == {f"t{n}": "".join(f"t{n}:{index} " for index in range(20)) for n in range(32)}
