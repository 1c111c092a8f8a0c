"""Whether a gateway says that it takes requests, and what it says when it does not."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from pipeline.client.testing import FakeServer
from pipeline.errors import ServerError
from pipeline.gateway.app import Gateway
from pipeline.gateway.server import GatewayServer, bound_sockets
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Running, Start, tiny


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def ready(running: Running) -> tuple[int, dict[str, str]]:
    answer = httpx.get(f"{running.url}/readyz", timeout=20, trust_env=False)
    assert answer.json()["ready"] is (answer.status_code == 200)
    return answer.status_code, answer.json()["faults"]


def test_ready_as_long_as_one_model_is(start: Start, other: FakeServer) -> None:
    running = start()
    running.gateway.models = {**running.gateway.models, "other": tiny(other.url)}
    assert ready(running) == (200, {})
    other.stop()
    status, faults = ready(running)
    assert (status, list(faults)) == (200, ["other"])
    running.upstream.stop()
    status, faults = ready(running)
    assert (status, list(faults)) == (503, ["tiny", "other"])


def test_not_ready_while_it_drains_and_nothing_new_is_taken(start: Start) -> None:
    running = start()
    running.gateway.draining = True
    assert ready(running) == (503, {"gateway": "draining"})
    url = f"{running.url}/v1/completions"
    refused = httpx.post(url, json={"model": "tiny", "prompt": "x"}, timeout=20, trust_env=False)
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
