"""A gateway of several workers: what they share, and what becomes of the others when one dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.process_state import ProcessStat
from tests.support.held_gateway import KEYS, LOST_S, MINUTE, NAME, Holding, Served, begin, chat
from tests.support.http_clients import http
from tests.support.names import HostsFile
from tests.support.waiting import wait_for
from tests.support.worker_gateway import PLACES, worker_gateway


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("workers")
    keys = folder / "keys.yaml"
    keys.write_text(KEYS)
    hosts = HostsFile(folder / "hosts")
    hosts.write(NAME, "127.0.0.1")
    with (
        ExitStack() as stack,
        Holding() as upstream,
        worker_gateway(
            f"dns:{NAME}:{upstream.port}", 2, keys=keys, cache=folder / "cache.db", hosts=hosts.file
        ) as gateway,
    ):

        def ready() -> bool:
            return http.get(f"{gateway.url}/readyz").status_code == 200

        wait_for(ready, "it was ready", LOST_S)
        yield Served(gateway, upstream, stack, hosts)
        upstream.let_go()


def test_a_limit_of_a_minute_is_that_of_all_workers(served: Served) -> None:
    def ask(client: httpx.Client) -> int:
        # What is refused counts, too.
        return sum(client.post(**chat("", "sk-shop", n=0)).status_code != 429 for _ in range(MINUTE))

    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        allowed = sum(threads.map(ask, served.clients()))
    assert MINUTE <= allowed <= MINUTE + (time.monotonic() - began) * MINUTE / 60 + 1


def test_workers_share_the_places_of_the_model(served: Served) -> None:
    first, second = served.clients()
    streams = [begin(served, served.client(served.gateway.workers()[at % 2])) for at in range(PLACES)]
    assert served.upstream.streams() == PLACES
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(client.post, **chat("short")) for client in (first, second)]
        waits = ("pipeline_requests_waiting", ("model", "tiny"))
        scraper = served.client(served.gateway.workers()[0])
        wait_for(lambda: served.metrics(scraper)[waits] == 2, "both wait", LOST_S)
        assert served.metrics(scraper)["pipeline_requests_running", ("model", "tiny")] == PLACES
        asked = len(served.upstream.requests)
        # The place of a stream of one worker goes to a request of whichever worker.
        streams[1][0].close()
        assert [answer.result().status_code for answer in waiting] == [200, 200]
        assert len(served.upstream.requests) == asked + 2
    served.let_go()
    for _, lines in (streams[0], *streams[2:]):
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_pages_are_the_same_on_each_worker(served: Served) -> None:
    first, second = served.clients()
    before = served.metrics(first)
    base, chats, tiny = ("adapter", ""), ("endpoint", "/v1/chat/completions"), ("model", "tiny")
    asked = ("pipeline_requests_total", base, chats, tiny, ("status", "200"))
    for client, times in ((first, 2), (second, 3)):
        for _ in range(times):
            assert client.post(**chat("Hello there", cache=False)).status_code == 200
    # A request is counted when its answer has been sent.
    wait_for(lambda: served.metrics(second)[asked] == before[asked] + 5, "all are counted", LOST_S)
    counts = [served.metrics(client) for client in (first, second)]
    assert counts[0] == counts[1]
    tokens = ("pipeline_generation_tokens_total", base, tiny)
    ttft = ("pipeline_time_to_first_token_seconds_count", base, tiny)
    assert (counts[0][tokens] - before[tokens], counts[0][ttft] - before[ttft]) == (5, 5)
    assert counts[0]["pipeline_workers",] == 2
    assert first.get("/readyz").json() == second.get("/readyz").json()


def test_a_wrong_answer_of_the_cache_is_reported_to_any_worker(served: Served) -> None:
    first, second = served.clients()
    question = chat("Is it cached?", temperature=0)
    caches = [client.post(**question) for client in (first, second)]
    assert [response.headers["x-cache"] for response in caches] == ["miss", "exact"]
    report = {"json": {"request_id": caches[1].headers["x-request-id"]}, "headers": question["headers"]}
    assert first.post("/v1/cache/false_hits", **report).json()["removed"] == 1
    assert first.post("/v1/cache/false_hits", **report).status_code == 404
    # Its memory of the cache is a tenth of a second behind at most.
    wait_for(lambda: second.post(**question).headers["x-cache"] == "miss", "it was asked again", LOST_S)


def test_a_response_is_continued_on_any_worker(served: Served) -> None:
    first, second = served.clients()
    headers = {"Authorization": "Bearer sk-free"}

    def create(client: httpx.Client, text: str, **fields: Any) -> Mapping[str, Any]:
        answer = client.post(
            "/v1/responses", json={"model": "tiny", "input": text, **fields}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        found: Mapping[str, Any] = answer.json()
        return found

    begun = create(first, "One")
    continued = create(second, "Two", previous_response_id=begun["id"])
    assert "user: One" in served.upstream.requests[-1].prompt
    assert first.get(f"/v1/responses/{continued['id']}", headers=headers).json() == continued
    assert second.delete(f"/v1/responses/{begun['id']}", headers=headers).json()["deleted"]
    for client in (first, second):
        assert client.get(f"/v1/responses/{begun['id']}", headers=headers).status_code == 404


def test_a_worker_that_is_killed_takes_its_own_streams_with_it_and_nothing_else(served: Served) -> None:
    killed, other = served.gateway.workers()
    of_killed, of_other = served.client(killed), served.client(other)
    broken = [begin(served, served.client(killed), "sk-three") for _ in range(2)]
    whole = begin(served, of_other, "sk-three")
    scraper = served.client(other)
    assert of_killed.post(**chat("Hi", "sk-three")).json()["error"]["code"] == "concurrency_limit"
    before = served.metrics(scraper)
    os.kill(killed, signal.SIGKILL)
    for _, lines in broken:
        with pytest.raises(httpx.TransportError):
            list(lines)
    # Nobody else notices: neither who is connected to the other worker, nor who comes now.
    assert served.client(other).post(**chat("Hi")).status_code == 200
    assert http.post(**{**chat("Hi"), "url": f"{served.gateway.url}/v1/chat/completions"}).status_code == 200
    wait_for(lambda: len({*served.gateway.workers()} - {killed}) == 2, "another was started", LOST_S)
    wait_for(lambda: served.metrics(scraper)["pipeline_workers",] == 2, "it was taken in", LOST_S)
    after = served.metrics(scraper)
    fallen = {name for name, value in before.items() if "_total" in name[0] and after[name] < value}
    assert not fallen
    assert after["pipeline_worker_restarts_total",] == before["pipeline_worker_restarts_total",] + 1
    # Its places, and what its tenant had running there, are free again.
    fresh = next(worker for worker in served.gateway.workers() if worker not in (killed, other))
    assert served.client(fresh).post(**chat("Hi", cache=False)).status_code == 200
    more = [begin(served, served.client(fresh), "sk-three") for _ in range(2)]
    assert served.client(fresh).post(**chat("Hi", "sk-three")).status_code == 429
    served.let_go()
    for _, lines in (whole, *more):
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_replaced(served: Served) -> None:
    stopped, _ = served.gateway.workers()
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: stopped not in served.gateway.workers(), "it was killed", LOST_S)
    wait_for(lambda: len(served.gateway.workers()) == 2, "another was started", LOST_S)


def test_a_server_is_probed_once_whatever_the_number_of_workers(served: Served) -> None:
    """About once a second while no tokens come; four times a second until it is found well."""
    seen, began = len(served.upstream.probes), time.monotonic()
    wait_for(lambda: len(served.upstream.probes) >= seen + 3, "probes", LOST_S)
    assert time.monotonic() - began >= 2


def test_workers_hear_of_replicas_that_come_and_go(served: Served) -> None:
    clients, first = served.clients(), served.upstream

    def endpoints() -> list[list[str]]:
        return [client.get("/readyz").json()["models"]["tiny"]["endpoints"] for client in clients]

    def turns(client: httpx.Client, number: int) -> None:
        """Two turns of a conversation."""
        messages = [{"role": "user", "content": f"I am {number}"}]
        for _ in range(2):
            answer = client.post(**chat("", messages=messages))
            assert answer.status_code == 200, answer.text
            said = answer.json()["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": "So?"},
            ]

    with Holding(host="127.0.0.2", port=first.port) as second:
        served.hosts.write(NAME, "127.0.0.1", "127.0.0.2")
        wait_for(lambda: endpoints() == [[first.url, second.url]] * 2, "both know the new one", LOST_S)
        wait_for(lambda: bool(second.probes), "it was probed", LOST_S)
        numbers = iter(range(10_000))
        for client in clients:
            # It is asked when the worker has heard that it is well.
            seen = len(second.requests)

            def is_asked() -> bool:
                turns(client, next(numbers))  # noqa: B023
                return len(second.requests) > seen  # noqa: B023

            wait_for(is_asked, "a request of this worker", LOST_S)
        before = (len(first.requests), len(second.requests))
        begun = next(numbers)
        for number in range(begun, begun + 20):
            # The first turn at one worker, the second at the other: they agree without a word.
            turns(clients[number % 2], number)
            turns(clients[1 - number % 2], number)
        for number in range(begun, begun + 20):
            told = f"I am {number}\n"
            assert sum(any(told in ask.prompt for ask in server.requests) for server in (first, second)) == 1
        assert len(first.requests) > before[0]
        assert len(second.requests) > before[1]
        # A stream on one that goes is not broken off.
        served.hosts.write(NAME, "127.0.0.2")
        wait_for(lambda: endpoints() == [[second.url]] * 2, "both know that the first is gone", LOST_S)
        stream, lines = begin(served, clients[0])
        assert second.streams() == 1
        served.hosts.write(NAME, "127.0.0.1")
        wait_for(lambda: endpoints() == [[first.url]] * 2, "the first is back", LOST_S)
        assert clients[1].post(**chat("Hi", cache=False)).status_code == 200
        second.let_go()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        stream.close()


def test_streams_of_workers_go_on_after_the_loss_of_their_server(served: Served) -> None:
    for client in served.clients():
        with client.stream("POST", **chat(f"broken {client.base_url}", stream=True)) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "0 1 2 3 "


def test_workers_count_losses_together(served: Served) -> None:
    first, *others = [client.post(**chat("poison", "sk-bad")) for client in served.clients() * 3]
    # The upstream is well again at once: two losses within a millisecond may count as one, and use up the attempts.
    assert first.json()["error"]["code"] in ("request_quarantined", "unavailable")
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in others} == {
        (500, "request_quarantined")
    }
    assert sum("poison" in asked.prompt for asked in served.upstream.requests) in (2, 3)
    quarantined = ("pipeline_loss_events_total", ("event", "quarantined"), ("model", "tiny"))
    assert [served.metrics(client)[quarantined] for client in served.clients()] == [1, 1]


@pytest.mark.servers
def test_a_second_ctrl_c_ends_all_workers_at_once(tmp_path: Path) -> None:
    """The first lets requests under way be completed."""
    hosts = HostsFile(tmp_path / "hosts")
    with (
        Holding() as upstream,
        worker_gateway(f"127.0.0.1:{upstream.port}", 2) as gateway,
        ExitStack() as stack,
    ):
        served, workers = Served(gateway, upstream, stack, hosts), gateway.workers()
        streams = [begin(served, client) for client in served.clients()]
        gateway.process.send_signal(signal.SIGINT)
        wait_for(lambda: not gateway.listens(), "end of listening", LOST_S)
        assert gateway.process.poll() is None
        assert upstream.streams() == len(streams)
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(LOST_S) == -signal.SIGINT
        wait_for(lambda: not any(map(ProcessStat.of, workers)), "the end of the workers", LOST_S)
        upstream.let_go()


@pytest.mark.servers
def test_all_workers_drain(served: Served) -> None:
    streams = [begin(served, client) for client in served.clients()]
    served.gateway.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not served.gateway.listens(), "end of listening", LOST_S)
    served.let_go()
    for _, lines in streams:
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert served.gateway.process.wait(LOST_S) == 0
