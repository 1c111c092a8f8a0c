"""Requests whose server is lost: asked again if nothing of the answer went out, else ended with how much came."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from pipeline.client import Timeouts
from pipeline.client.testing import Ending, FakeServer, Received, Reply
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http, http_client
from tests.support.scripted_model import Upstream
from tests.support.waiting import wait_for

DEAD = Reply([], ending=Ending.ERROR, error="Stub process 'tensorrt_llm_0_0' is not healthy.")
LOST = Reply([], ending=Ending.LOST)
CUT = Reply(["one ", "two ", "three "], ending=Ending.LOST)
WHOLE = Reply(["one ", "two "])


def complete(running: Running, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": "x", "temperature": 0, **fields}
    return http.post(f"{running.url}/v1/completions", json=body, timeout=60)


def events(answer: httpx.Response) -> list[dict[str, object]]:
    """Events of a stream that was broken off; `[DONE]` must not be among them."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert "[DONE]" not in lines
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("first", [DEAD, LOST])
@pytest.mark.parametrize("stream", [False, True])
def test_what_had_no_token_yet_is_asked_again(start: Start, first: Reply, *, stream: bool) -> None:
    replies = iter([first, WHOLE])
    running = start(lambda _: next(replies))
    answer = complete(running, stream=stream)
    assert answer.status_code == 200
    assert ("[DONE]" in answer.text) is stream
    first_sent, again = running.upstream.requests
    assert (first_sent.request_id, first_sent.tensors) == (again.request_id, again.tensors)
    wait_for(lambda: running.metric("pipeline_retries_total") == 1, "a count")
    assert running.metric("pipeline_generation_tokens_total") == 2
    assert running.metric("pipeline_prompt_tokens_total") == 1


def test_a_sampled_request_is_asked_again_with_the_seed_that_was_drawn(start: Start) -> None:
    replies = iter([DEAD, WHOLE])
    running = start(lambda _: next(replies))
    assert complete(running, temperature=1).status_code == 200
    first, again = running.upstream.requests
    assert first.tensors["seed"] == again.tensors["seed"]


def test_several_choices_are_asked_again_each_and_charged_once(start: Start) -> None:
    """The first attempt of each is lost; what the tenant may use is just enough for one."""
    seen = set[str]()

    def script(received: Received) -> Reply:
        first = received.request_id not in seen
        seen.add(received.request_id)
        return DEAD if first else WHOLE

    most = TenantLimits(requests_per_minute=3, tokens_per_minute=1 + 3 * 41, concurrency=3)
    tenants = Tenants()
    tenants._everybody = Tenant("", most)
    running = start(script, tenants=tenants)
    answer = complete(running, n=3, max_tokens=40)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["one two "] * 3
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert len(running.upstream.requests) == 6
    wait_for(lambda: running.metric("pipeline_retries_total") == 3, "a count")


def test_a_whole_answer_is_asked_again_even_if_a_part_of_it_had_come(start: Start) -> None:
    replies = iter([CUT, WHOLE])
    running = start(lambda _: next(replies))
    answer = complete(running).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("one two ", 2)


def test_a_stream_that_had_begun_ends_with_an_error_that_says_how_much_came(start: Start) -> None:
    running = start(CUT)
    told = events(complete(running, stream=True))
    error = told[-1]["error"]
    assert isinstance(error, dict)
    assert (error["code"], error["type"], error["completion_tokens"]) == ("upstream_lost", "server_error", 3)
    assert "3 tokens of the answer had come, and the request may be sent again" in error["message"]
    assert len(running.upstream.requests) == 1
    with pytest.raises(openai.APIError, match="3 tokens") as caught:
        list(running.client().completions.create(model="tiny", prompt="x", stream=True))
    assert caught.value.code == "upstream_lost"


def test_a_request_that_is_lost_each_time_is_not_asked_for_ever(start: Start) -> None:
    running = start(CUT)
    answer = complete(running)
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["type"]) == (500, "request_quarantined", "server_error")
    assert told["request_id"] == answer.headers["x-request-id"]
    assert "lost 2 times" in told["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    running = start(DEAD)
    answer = complete(running, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_quarantined")
    assert len(running.upstream.requests) == 2, "it may be what ends the server"


def test_no_token_for_too_long_ends_an_answer_and_says_so(start: Start) -> None:
    running = start(Reply(["one ", "two "], ending=Ending.HANG), timeouts=Timeouts(between_tokens_s=0.3))
    error = events(complete(running, stream=True))[-1]["error"]
    assert isinstance(error, dict)
    assert (error["code"], error["completion_tokens"]) == ("timeout", 2)
    assert "stalled: nothing for 0.3 s" in error["message"]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def waiting(running: Running) -> Callable[[int], None]:
    def wait(count: int) -> None:
        wait_for(lambda: running.served.queue.waiting == count, f"{count} requests that wait")

    return wait


def test_requests_wait_while_the_server_is_restarted(start: Start, threads: ThreadPoolExecutor) -> None:
    """One was under way, others come meanwhile, one of them leaves; then another server listens there."""
    running = start(Reply([], ending=Ending.HANG))
    first = threads.submit(complete, running, stream=True)
    wait_for(lambda: len(running.upstream.requests) == 1, "a request")
    running.upstream.stop()
    waiting(running)(1)
    others = [threads.submit(complete, running, prompt=f"{n}", stream=n % 2 == 0) for n in range(3)]
    waiting(running)(4)
    url = f"{running.url}/v1/completions"
    with (
        pytest.raises(httpx.ReadTimeout),
        http_client(timeout=httpx.Timeout(10, read=0.3)) as leaving,
    ):
        leaving.post(url, json={"model": "tiny", "prompt": "x"})
    waiting(running)(4)
    with Upstream(lambda received: Reply([received.prompt]), port=running.upstream.port) as back:
        answers = [answer.result(60) for answer in (first, *others)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert sorted(received.prompt for received in back.requests) == ["0", "1", "2", "x"]
        waiting(running)(0)


def test_who_waits_for_too_long_is_told_when_to_come_back(start: Start, threads: ThreadPoolExecutor) -> None:
    running = start(max_wait_s=0.3, max_waiting=2)
    running.upstream.stop()
    wait_for(lambda: running.served.readiness.fault is not None, "a fault")
    answers = list(threads.map(lambda _: complete(running, stream=True), range(4)))
    told = {(answer.status_code, answer.json()["error"]["code"]) for answer in answers}
    assert told == {(503, "unavailable")}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert any("was not ready for 0.3 s" in answer.text for answer in answers)


def test_a_lost_server_is_replaced_by_the_next(start: Start) -> None:
    left = threading.Event()
    with FakeServer(lambda _: Reply(["."]) if not left.is_set() else LOST) as second:
        running = start(WHOLE, also=[second.url], spread="least-load")
        wait_for(
            lambda: [endpoint.ill for endpoint in running.served.client.endpoints] == [False, False],
            "readiness",
        )
        left.set()
        assert [complete(running).status_code for _ in range(6)] == [200] * 6
        assert running.metric("pipeline_retries_total") <= 6
