"""Whether a gateway says that it takes requests, and what it says when it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pipeline.client.testing import Ending, FakeServer, Reply
from pipeline.errors import ServerError
from pipeline.gateway import readiness
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.http_server import bound_sockets
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http
from tests.support.scripted_model import tiny
from tests.support.waiting import wait_for


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def ready(running: Running) -> tuple[int, dict[str, str]]:
    answer = http.get(f"{running.url}/readyz", timeout=20)
    assert answer.json()["ready"] is (answer.status_code == 200)
    return answer.status_code, answer.json()["faults"]


def wait_until(running: Running, status: int, *faults: str) -> None:
    def holds() -> bool:
        found, told = ready(running)
        return (found, list(told)) == (status, list(faults))

    wait_for(holds, f"{status} with faults of {faults}", 30)


def test_ready_as_long_as_one_model_is(start: Start, other: FakeServer) -> None:
    running = start()
    running.gateway.models["other"] = tiny(other.url, name="other")
    wait_until(running, 200, "other")
    assert ready(running)[1] == {"other": "it is not watched yet"}
    running.client().completions.create(model="other", prompt="x")
    wait_until(running, 200)
    other.stop()
    wait_until(running, 200, "other")
    running.upstream.stop()
    wait_until(running, 503, "tiny", "other")
    assert running.upstream.url in ready(running)[1]["tiny"]


@pytest.mark.parametrize(
    "ill",
    [
        Reply([], ending=Ending.HANG),
        Reply([], ending=Ending.ERROR, error="Stub process 'tensorrt_llm_0_0' is not healthy."),
        Reply([], ending=Ending.LOST),
    ],
)
def test_a_server_that_listens_and_does_not_generate_is_not_ready(
    start: Start, ill: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton itself says that it is ready all the while."""
    monkeypatch.setattr(readiness, "_DEADLINE_S", 0.5)
    monkeypatch.setattr(readiness, "_ABANDON_S", 1.0)
    running = start()
    wait_until(running, 200)
    running.upstream.probe = ill
    wait_until(running, 503, "tiny")
    running.upstream.probe = Reply(["."])
    wait_until(running, 200)


def test_a_server_that_is_busy_with_long_answers_is_ready(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe gets through; tokens of an answer show that it is well. When they stop, it is not."""
    monkeypatch.setattr(readiness, "_DEADLINE_S", 2.0)
    running = start(Reply(["a "] * 3000, delay_s=0.02))
    wait_until(running, 200)
    running.upstream.probe = Reply([], ending=Ending.HANG)
    before = len(running.upstream.probes)
    wait_for(lambda: len(running.upstream.probes) > before, "a probe")
    with running.client().completions.create(model="tiny", prompt="x", stream=True) as stream:
        enough = time.monotonic() + readiness._DEADLINE_S + 0.5
        while time.monotonic() < enough:
            next(stream)
            assert ready(running) == (200, {})
            time.sleep(0.1)
    wait_until(running, 503, "tiny")


def test_the_ill_one_of_two_servers_is_not_asked(start: Start, other: FakeServer) -> None:
    running = start()
    both = running.gateway.models["both"] = tiny([running.upstream.url, other.url], name="both")
    running.client().completions.create(model="both", prompt="x")
    other.stop()
    wait_for(lambda: [endpoint.ill for endpoint in both.client.endpoints] == [False, True], "a mark", 30)
    before = len(running.upstream.requests)
    for _ in range(4):
        running.client().completions.create(model="both", prompt="x")
    assert len(running.upstream.requests) == before + 4
    assert (both.readiness.fault, ready(running)[0]) == (None, 200)


def test_not_ready_while_it_drains_and_nothing_new_is_taken(start: Start) -> None:
    running = start()
    wait_until(running, 200)
    running.gateway.context.draining = True
    assert ready(running) == (503, {"gateway": "draining"})
    url = f"{running.url}/v1/completions"
    refused = http.post(url, json={"model": "tiny", "prompt": "x"}, timeout=20)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    assert not running.upstream.requests


def test_an_address_that_another_took_meanwhile_is_told(other: FakeServer) -> None:
    """Both were bound to it, as two that wait for their servers are; then the other listens first."""
    server = GatewayServer(Gateway({"tiny": tiny(other.url)}, Tenants()), "127.0.0.1", 0)
    with (
        bound_sockets("127.0.0.1", 0) as (first,),
        bound_sockets("127.0.0.1", first.getsockname()[1]) as second,
    ):
        first.listen()
        with pytest.raises(ServerError, match=r"cannot listen on 127\.0\.0\.1:0: .*address already in use"):
            server.run(second)
        with pytest.raises(ServerError, match="address already in use"), bound_sockets(*first.getsockname()):
            pass
