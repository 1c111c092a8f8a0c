"""A gateway in front of several servers, which come and go: who is asked, how many at once, and what nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from pipeline.client.testing import Ending, Received, Reply
from tests.gateway.conftest import Running, Start
from tests.gateway.test_gateway_metrics import samples
from tests.support.http_clients import http
from tests.support.names import Names, use_names
from tests.support.scripted_model import Upstream
from tests.support.waiting import wait_for

NAME = "replicas.test"


@dataclass
class Fleet:
    """Three servers with one port at several addresses of loopback, and the name that some of them have."""

    start: Start
    names: Names
    stack: ExitStack
    servers: list[Upstream] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        for number in (1, 2, 3):
            port = self.servers[0].port if self.servers else 0
            server = Upstream(self._answer, host=f"127.0.0.{number}", port=port)
            self.servers.append(self.stack.enter_context(server))
        self.threads = self.stack.enter_context(ThreadPoolExecutor(16))
        self.stack.callback(self.gate.set)

    @property
    def url(self) -> str:
        return f"dns:{NAME}:{self.servers[0].port}"

    def announce(self, *numbers: int) -> None:
        self.names.addresses[NAME] = [self.servers[number].url.partition(":")[0] for number in numbers]

    def run(self, **settings: object) -> Running:
        """A gateway that has the name alone."""
        return self.start(upstream=self.servers[0], urls=[self.url], max_waiting=64, **settings)

    def _answer(self, _: Received) -> Reply:
        assert self.gate.wait(60)
        return Reply(["a"])

    def asked(self) -> list[int]:
        return [len(server.requests) for server in self.servers]


@pytest.fixture
def fleet(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    names = Names()
    use_names(names, monkeypatch.setattr)
    with ExitStack() as stack:
        yield Fleet(start, names, stack)


def post(running: Running, question: str, **fields: object) -> httpx.Response:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, **fields}
    return http.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)


def endpoints(running: Running) -> list[str]:
    answer = http.get(f"{running.url}/readyz", timeout=60).json()
    found: list[str] = answer["models"]["tiny"]["endpoints"] if answer["ready"] else []
    return found


def test_replicas_come_and_go_without_a_failed_request(fleet: Fleet) -> None:
    fleet.announce()
    running = fleet.run(spread="least-load")
    ready = http.get(f"{running.url}/readyz", timeout=60)
    assert ready.status_code == 503
    assert "no server of it is known: " in ready.json()["faults"]["tiny"]
    # Whoever asks before there is a server waits for one.
    early = fleet.threads.submit(post, running, "Hi")
    fleet.announce(0)
    assert early.result(60).status_code == 200
    stop = threading.Event()

    def keep_asking() -> set[int]:
        found = set()
        while not stop.is_set():
            found.add(post(running, "Hi").status_code)
        return found

    asking = [fleet.threads.submit(keep_asking) for _ in range(3)]
    try:
        for numbers in ((0, 1), (1, 2), (2,), (0, 1, 2)):
            fleet.announce(*numbers)
            urls = {fleet.servers[number].url for number in numbers}
            wait_for(lambda: set(endpoints(running)) == urls, f"servers {numbers}")  # noqa: B023
            before = fleet.asked()

            def all_were_asked() -> bool:
                return all(fleet.asked()[at] > before[at] for at in numbers)  # noqa: B023

            wait_for(all_were_asked, f"requests at {numbers}", 60)
        # One that is gone without a word, as when its machine is: nothing fails for it, either.
        fleet.servers[0].stop()
        before = fleet.asked()
        wait_for(lambda: sum(fleet.asked()) > sum(before) + 20, "more requests", 60)
    finally:
        stop.set()
    assert [asked.result(60) for asked in asking] == [{200}] * 3


def test_all_servers_that_are_well_have_their_slots_and_one_that_is_new_is_probed_first(fleet: Fleet) -> None:
    fleet.announce(0, 1)
    fleet.servers[1].probe = Reply([], ending=Ending.ERROR, error="Stub process is not healthy.")
    running = fleet.run(places=2, slots_per_server=2)
    wait_for(lambda: bool(endpoints(running)), "readiness")
    fleet.gate.clear()
    asked: list[Future[httpx.Response]] = [
        fleet.threads.submit(post, running, f"question {number}") for number in range(7)
    ]
    queue = running.served.queue
    wait_for(lambda: (queue.running, queue.waiting) == (2, 5), "two slots")
    assert fleet.asked()[1] == 0
    fleet.servers[1].probe = Reply(["."])
    wait_for(lambda: (queue.running, queue.waiting) == (4, 3), "two slots more", 60)
    fleet.announce(0, 1, 2)
    wait_for(lambda: (queue.running, queue.waiting) == (6, 1), "six slots", 60)
    # Whatever the prompts begin with: no server gets more than it has slots for.
    wait_for(lambda: fleet.asked() == [2, 2, 2], "two requests at each")
    fleet.announce(0)
    wait_for(lambda: queue.slots == 2, "two slots again", 60)
    fleet.gate.set()
    assert {answer.result(60).status_code for answer in asked} == {200}
    page = samples(http.get(f"{running.url}/metrics", timeout=60).text)
    sent = [
        page["pipeline_server_requests_total", ("model", "tiny"), ("server", server.url)]
        for server in fleet.servers
    ]
    assert sent == fleet.asked(), "those that are gone are still counted"


def test_turns_of_a_conversation_go_to_one_server(fleet: Fleet) -> None:
    fleet.announce(0, 1, 2)
    running = fleet.run()
    wait_for(lambda: len(endpoints(running)) == 3, "readiness")
    wait_for(lambda: not any(endpoint.ill for endpoint in running.served.client.endpoints), "all are well")

    def turns(number: int, **fields: object) -> set[int]:
        """Where three turns went."""
        messages = [{"role": "system", "content": "Be brief."}]
        found = set()
        for question in (f"I am {number}", "And now?", "And then?"):
            messages.append({"role": "user", "content": question})
            body = {"model": "tiny", "messages": messages, "max_tokens": 4, **fields}
            before = fleet.asked()
            http.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
            found.add(next(at for at, count in enumerate(fleet.asked()) if count > before[at]))
            messages.append({"role": "assistant", "content": "a"})
        return found

    places = [turns(number) for number in range(8)]
    assert {len(place) for place in places} == {1}
    assert len(set.union(*places)) > 1
    # A client that says what belongs together decides.
    assert len(set.union(*(turns(number, prompt_cache_key="user-7") for number in range(4)))) == 1
    ignored = {"prompt_cache_key": "user-7", "user": "x", "safety_identifier": "y"}
    assert post(running, "Hi", **ignored).status_code == 200
