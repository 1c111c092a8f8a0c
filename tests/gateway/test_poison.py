"""Requests that end servers are quarantined, and their tenants told from innocent ones and from the machine."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from pipeline.cache.redis_server import RedisAddress
from pipeline.client.testing import Ending, Received, Reply
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.blame import MAX_COOL_DOWN_S
from pipeline.gateway.shared_redis import RedisBuckets
from tests.gateway.conftest import Running, Start, keyed
from tests.gateway.test_gateway_batches import create, lines, read, wait_until
from tests.gateway.test_migration import Engine, ask
from tests.support.http_clients import http
from tests.support.scripted_model import Upstream
from tests.support.servers import RedisServer, Unavailable
from tests.support.waiting import wait_for

LOST = Reply([], ending=Ending.LOST)
OK = Reply(["fine"])


class Mortal(Upstream):
    """A server that ends with every request that a prompt with "poison" is among, and is there again at once."""

    def __init__(self, innocent: Reply = OK, **named: Any) -> None:
        super().__init__(self.script, **named)
        self.innocent, self.begun = innocent, 1
        self.ends = math.inf  # how often it ends before it is immune

    def script(self, received: Received) -> Reply:
        if "poison" not in received.prompt or not self.ends:
            return self.innocent
        self.ends -= 1
        # With those that were to be in flight when it comes for the first time.
        wait_for(lambda: len(self._open) >= self.begun, "others in flight", 60)
        self.begun = 1
        self.lose_all(but=received)
        return LOST

    def lose_all(self, but: Received | None = None) -> None:
        """End all answers as the death of a server does."""
        for received, over in list(self._open.values()):
            if received is not but and received in self.requests:
                over.set()

    def asked(self) -> Counter[str]:
        """How often each prompt was sent."""
        return Counter(received.prompt for received in self.requests)


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    with Mortal() as upstream:
        yield upstream


def complete(url: str, prompt: str, key: str = "", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http.post(f"{url}/v1/completions", json=body, headers=headers, timeout=90)


def events(running: Running) -> dict[str, float]:
    kinds = ("lost", "quarantined", "cool_down")
    return {kind: running.metric("pipeline_loss_events_total", event=kind) for kind in kinds}


def code(answer: httpx.Response) -> str | None:
    found: str | None = answer.json()["error"]["code"]
    return found


def test_a_poison_is_not_sent_a_third_time_however_it_comes_again(
    start: Start, mortal: Mortal, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(upstream=mortal)
    first = complete(running.url, "poison")
    assert (first.status_code, code(first)) == (500, "request_quarantined")
    assert first.headers["x-should-retry"] == "false"
    id = first.headers["x-request-id"]
    assert any(f"request {id} was in flight at 2 losses" in line for line in caplog.messages)
    # Streamed, by another id, or with a seed that is drawn anew: the same request.
    again = [complete(running.url, "poison", stream=stream) for stream in (False, True)]
    assert {(answer.status_code, code(answer)) for answer in again} == {(500, "request_quarantined")}
    assert mortal.asked() == {"poison": 2}
    # Anything that changes the work makes it another one.
    assert complete(running.url, "innocent").status_code == 200
    assert code(complete(running.url, "poison", max_tokens=3)) == "request_quarantined"
    assert mortal.asked()["poison"] == 4
    assert events(running) == {"lost": 4, "quarantined": 2, "cool_down": 0}


def test_a_stream_that_broke_off_counts_when_its_client_sends_it_again(start: Start) -> None:
    running = start(Reply(["one ", "two "], ending=Ending.LOST))
    codes = []
    for _ in range(3):
        answer = complete(running.url, "poison", stream=True)
        codes.append("upstream_lost" if answer.status_code == 200 else code(answer))
        wait_for(lambda: running.served.readiness.fault is None, "a server that is well")
    assert codes == ["upstream_lost", "upstream_lost", "request_quarantined"]
    assert len(running.upstream.requests) == 2


def test_a_stream_goes_on_after_both_losses_by_anothers_poison(start: Start) -> None:
    """Its turn ends before it does, and then the poison has its own. It goes on until the poison is over."""
    answer = Engine([f"{number} " for number in range(600)], [1] * 600)

    def script(received: Received) -> Reply:
        if received.prompt != "poison":
            return replace(answer(received), delay_s=0.1 if upstream.asked()["poison"] < 2 else 0.0)
        times = upstream.asked()["x"]
        upstream.lose_all(but=received)
        wait_for(lambda: upstream.asked()["x"] > times, "the stream, which has its turn first", 60)
        return LOST

    upstream = Mortal()
    upstream.begin(script)
    with upstream, ThreadPoolExecutor(1) as threads:
        running = start(upstream=upstream, tenants=keyed("bad", "good"))
        stream = threads.submit(ask, running.url, "/v1/completions", headers={"Authorization": "Bearer good"})
        wait_for(lambda: len(upstream.requests) == 1, "the stream")
        assert code(complete(running.url, "poison", "bad")) == "request_quarantined"
        told = stream.result()
    assert (told.error, told.text, told.tokens) == (None, "".join(answer.pieces), 600)
    assert upstream.asked() == {"x": 3, "poison": 2}


def test_another_tenants_requests_are_answered_whatever_was_in_flight_with_them(
    start: Start, mortal: Mortal
) -> None:
    """The others' requests go out apart from the poison, and no equal request of theirs is refused."""
    upstream = mortal
    upstream.innocent, upstream.begun = Reply(["fine"], first_delay_s=0.5), 5
    running = start(upstream=upstream, tenants=keyed("bad", "good"), places=6)
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(complete, running.url, f"q{n}", "good") for n in range(4)]
        wait_for(lambda: len(upstream.requests) == 4, "four requests in flight")
        bad = threads.submit(complete, running.url, "poison", "bad")
        wait_for(lambda: "poison" in upstream.asked(), "the poison")
        assert [answer.result().status_code for answer in good] == [200] * 4
        assert code(bad.result()) == "request_quarantined"
    assert upstream.asked()["poison"] == 2
    assert max(count for prompt, count in upstream.asked().items() if prompt != "poison") == 2
    # The same text of another tenant is another request.
    upstream.innocent = OK
    assert complete(running.url, "q0", "good").status_code == 200


def test_a_tenant_with_ever_new_poisons_cools_down_and_says_why(
    start: Start, mortal: Mortal, caplog: pytest.LogCaptureFixture
) -> None:
    mortal.innocent = Reply(["fine"], first_delay_s=0.05)
    running = start(upstream=mortal, tenants=keyed("bad", "good"), places=6)
    over, answers = threading.Event(), list[int]()

    def go_on() -> None:
        number = 0
        while not over.is_set():
            answers.append(complete(running.url, f"q{number}", "good").status_code)
            number += 1

    with ThreadPoolExecutor(2) as threads:
        goods = [threads.submit(go_on) for _ in range(2)]
        try:
            for number in range(20):
                last = complete(running.url, f"poison {number}", "bad")
                if last.status_code == 429:
                    break
        finally:
            over.set()
        for answer in goods:
            answer.result()
    assert (last.status_code, code(last)) == (429, "tenant_cooling_down")
    assert 1 <= int(last.headers["retry-after"]) <= MAX_COOL_DOWN_S
    assert "with requests of this key, and of no other, in flight" in last.json()["error"]["message"]
    assert code(complete(running.url, "harmless", "bad")) == "tenant_cooling_down"
    assert complete(running.url, "harmless", "good").status_code == 200
    # What was in flight at two losses before anybody was blamed is all that the other tenant lost.
    assert answers.count(200) >= 0.9 * len(answers)
    assert set(answers) <= {200, 500}
    assert events(running)["cool_down"] == 1
    assert any("tenant bad: servers were lost with its requests" in line for line in caplog.messages)


def poisoned(count: int, at: int) -> Sequence[dict[str, Any]]:
    made = lines(count)
    made[at]["body"]["messages"][0]["content"] = "poison"
    return made


def poison_of(upstream: Upstream) -> int:
    return sum("poison" in received.prompt for received in upstream.requests)


@pytest.mark.usefixtures("short_polls")
def test_a_line_of_a_batch_fails_and_the_rest_goes_on(start: Start, mortal: Mortal, tmp_path: Path) -> None:
    """Whatever was in flight with it the first time goes out one by one, and is answered."""
    mortal.innocent, mortal.begun = Reply(["fine"], first_delay_s=0.5), 5
    running = start(upstream=mortal, batches=BatchStorage(BatchFolder(tmp_path)), places=10)
    client = running.client()
    done = wait_until(client, create(client, poisoned(5, at=2)), "completed")
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 5, "completed": 4, "failed": 1}
    (error,) = read(client, done.error_file_id)
    assert (error["custom_id"], error["response"]) == ("r2", None)
    assert error["error"]["code"] == "request_quarantined"
    assert "lost 2 times" in error["error"]["message"]
    assert poison_of(running.upstream) == 2


@pytest.mark.usefixtures("short_polls")
def test_losses_of_a_line_are_counted_beyond_the_gateway(start: Start, tmp_path: Path) -> None:
    """One loss in each of two gateways, as if everything ended with the first; then no third gateway sends it.

    The others that were in flight at the first loss are sent one by one by the second gateway, and answered.
    """
    hang = Reply([], ending=Ending.HANG)
    first_upstream = Mortal(hang)
    first_upstream.begun, first_upstream.ends = 3, 1
    with first_upstream, Mortal() as second_upstream:
        first = start(upstream=first_upstream, batches=BatchStorage(BatchFolder(tmp_path)), places=6)
        batch = create(first.client(), poisoned(3, at=1))
        lost = BatchStorage(BatchFolder(tmp_path)).claims
        wait_for(lambda: lost.losses(batch.id) == {0: 1, 1: 1, 2: 1}, "the loss", 60)
        first.server.should_exit = True
        second = start(upstream=second_upstream, batches=BatchStorage(BatchFolder(tmp_path)), places=6)
        client = second.client()
        done = wait_until(client, batch, "completed")
        assert poison_of(second_upstream) == 1
        (error,) = read(client, done.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("r1", "request_quarantined")
        assert [line["custom_id"] for line in read(client, done.output_file_id)] == ["r0", "r2"]
        assert lost.losses(batch.id) == {}


def test_a_server_that_dies_while_idle_is_the_machines_loss(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    running = start(OK)
    assert complete(running.url, "x").status_code == 200
    running.upstream.stop()
    wait_for(lambda: events(running)["lost"] == 1, "a loss", 60)
    with Upstream(OK, port=running.upstream.port):
        assert complete(running.url, "x").status_code == 200
        assert events(running) == {"lost": 1, "quarantined": 0, "cool_down": 0}


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_gateways_that_share_limits_count_together(start: Start, kind: str) -> None:
    """A stream that began and was lost at one gateway, and again at another one, goes to no third server."""
    try:
        server = RedisServer(kind)
    except Unavailable as error:
        pytest.skip(f"no server of {kind} here: {error}")
    cut = Reply(["one "], ending=Ending.LOST)
    with server:
        address = RedisAddress.parse(server.url)
        gateways = [
            start(
                lambda received: cut if "poison" in received.prompt else OK,
                buckets=RedisBuckets(address, timeout_s=20),
                tenants=keyed("bad", "good"),
            )
            for _ in range(3)
        ]
        counted = redis.Redis(port=server.port, protocol=2)
        for running in gateways[:2]:
            assert '"upstream_lost"' in complete(running.url, "poison", "bad", stream=True).text
            # A request that is sent before the loss is known may have been lost with the same server.
            wait_for(lambda: counted.keys("pipeline:losses:*"), "the count of a loss", 60)
        counted.close()
        for running in gateways:
            # It hears of it within about a second.
            wait_for(
                lambda at=running: at.served.queue.lost_servers.judge._held_elsewhere != {},
                "the quarantine",
                60,
            )
            wait_for(lambda at=running: at.served.readiness.fault is None, "a server that is well", 60)
            assert code(complete(running.url, "poison", "bad")) == "request_quarantined"
            assert complete(running.url, "harmless", "good").status_code == 200
        assert [len(gateway.upstream.requests) for gateway in gateways] == [2, 2, 1]


@pytest.mark.servers
def test_one_loss_that_several_gateways_report_is_one(start: Start) -> None:
    """A request that many clients send is in flight at each gateway when the server is lost, and passes afterwards."""
    with RedisServer() as server, Mortal(Reply(["fine"], first_delay_s=0.5)) as upstream:
        address = RedisAddress.parse(server.url)
        gateways = [start(upstream=upstream, buckets=RedisBuckets(address, timeout_s=20)) for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:
            popular = [threads.submit(complete, running.url, "hello") for running in gateways]
            wait_for(lambda: upstream.asked()["hello"] == 3, "three in flight")
            upstream.lose_all()
            assert [answer.result().status_code for answer in popular] == [200] * 3
        assert [events(running)["quarantined"] for running in gateways] == [0, 0, 0]
