"""Several servers, servers that fail, and servers that have too much to do: both clients alike."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pipeline.client import (
    Answer,
    AsyncClient,
    Busy,
    Client,
    ConnectFailed,
    ModelNotFound,
    Refused,
    Retries,
    ServerFailed,
    ServerLost,
)
from pipeline.client.endpoints import Endpoint, EndpointPool
from pipeline.client.testing import Ending, FakeServer, Reply
from tests.support.certificates import self_signed
from tests.support.client_faces import LoopClient

Ask = Callable[..., Answer]
QUICK = Retries(attempts=3, first_s=0.01)


def asking(face: Callable[..., Any]) -> Ask:
    def ask(urls: list[str], **settings: object) -> Answer:
        with face(urls, **{"retries": QUICK, "spread": "least-load", **settings}) as client:
            answer: Answer = client.generate("Hi", max_tokens=4)
            return answer

    return ask


both = pytest.mark.parametrize("ask", [asking(Client), asking(LoopClient)], ids=["blocking", "asyncio"])
blocking = asking(Client)


def nobody() -> str:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


@both
def test_a_server_that_is_gone_is_passed_over(ask: Ask) -> None:
    with FakeServer(Reply(["a"])) as server:
        for urls in ([nobody(), server.url], [server.url, nobody()], [nobody(), nobody(), server.url]):
            assert ask(urls).text == "a"
    with pytest.raises(ConnectFailed):
        ask([nobody(), nobody()])


@both
def test_a_server_that_is_lost_before_its_first_token_is_replaced(ask: Ask) -> None:
    with FakeServer(Reply([], ending=Ending.LOST)) as lost, FakeServer(Reply(["a"])) as server:
        answers = [ask(urls) for urls in ([lost.url, server.url], [server.url, lost.url])]
        assert [answer.text for answer in answers] == ["a", "a"]
        assert lost.requests


@both
def test_a_server_that_is_lost_in_the_answer_is_not_asked_again(ask: Ask) -> None:
    with (
        FakeServer(Reply(["a"], ending=Ending.LOST)) as lost,
        FakeServer(Reply(["a"], ending=Ending.LOST)) as other,
    ):
        with pytest.raises(ServerFailed, match="in the middle of the answer"):
            ask([lost.url, other.url])
        assert len(lost.requests) + len(other.requests) == 1


# As Triton 24.10 words them while a process of a model is dead, or it stops.
UNAVAILABLE = (
    "Stub process 'tensorrt_llm_0_0' is not healthy.",
    "[request id: 1] Server is stopping, scheduler for model has stopped accepting new inference requests",
    "Request for unknown model: 'tensorrt_llm' has no available versions",
)


@pytest.mark.parametrize("error", UNAVAILABLE)
def test_a_model_that_cannot_run_now_is_asked_again_unless_a_part_of_the_answer_came(error: str) -> None:
    with FakeServer([Reply([], ending=Ending.ERROR, error=error), Reply(["a"])]) as server:
        assert blocking([server.url]).text == "a"
        assert len(server.requests) == 2
    with FakeServer(Reply(["a", "bc"], ending=Ending.ERROR, error=error)) as server:
        with pytest.raises(ServerLost, match=r"\(after 2 chunks of the answer, 3 characters\)$") as caught:
            blocking([server.url])
        assert (caught.value.text, caught.value.url) == ("abc", server.url)
        assert len(server.requests) == 1


def test_a_refusal_that_quotes_such_words_is_none_of_them() -> None:
    error = "stop = 'server is stopping': must be shorter"
    with FakeServer(Reply([], ending=Ending.ERROR, error=error)) as server:
        with pytest.raises(Refused):
            blocking([server.url])
        assert len(server.requests) == 1
    unknown = "Request for unknown model: 'nope' is not found"
    with FakeServer(Reply([], ending=Ending.ERROR, error=unknown)) as server, pytest.raises(ModelNotFound):
        blocking([server.url])


@both
def test_a_server_that_is_being_restarted_is_waited_for(ask: Ask) -> None:
    with FakeServer() as gone:
        gone.stop()
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask, [gone.url], retries=Retries(attempts=1, wait_s=60))
            time.sleep(0.2)
            assert not asked.done()
            with FakeServer(Reply(["back"]), port=gone.port):
                assert asked.result(60).text == "back"


@both
def test_a_busy_server_is_asked_again_after_a_while(ask: Ask) -> None:
    full = "[request id: 1] Exceeds maximum queue size"
    replies = iter([Reply([], ending=Ending.ERROR, error=full)] * 2 + [Reply(["a"])])
    with FakeServer(lambda _: next(replies)) as server:
        answer = ask([server.url])
        assert answer.text == "a"
        assert len(server.requests) == 3
        assert answer.stats.ttft_ms is not None
        assert answer.stats.ttft_ms > 10  # the waits are a part of it


@both
def test_in_the_end_it_is_too_busy(ask: Ask) -> None:
    with FakeServer(Reply([], ending=Ending.ERROR, error="Exceeds maximum queue size")) as server:
        with pytest.raises(Busy, match="too much to do"):
            ask([server.url])
        assert len(server.requests) == 3
        with pytest.raises(Busy):
            ask([server.url], retries=Retries(attempts=1))
        assert len(server.requests) == 4


def test_requests_are_spread_by_how_many_are_under_way() -> None:
    with (
        FakeServer(Reply(["a"], first_delay_s=0.3)) as server,
        FakeServer(Reply(["a"], first_delay_s=0.3)) as other,
    ):

        async def ask() -> None:
            async with AsyncClient([server.url, other.url], spread="least-load") as client:
                await asyncio.gather(*(client.generate("Hi", max_tokens=4) for _ in range(10)))

        asyncio.run(ask())
        assert len(server.requests) == len(other.requests) == 5


def test_a_failed_endpoint_is_avoided_longer_each_time_and_comes_back() -> None:
    pool = EndpointPool([Endpoint(name, None, None, None, None) for name in "ab"])
    failed = pool.acquire()
    pool.release(failed, failed=True)
    first_cooldown = failed.cooldown_until
    for _ in range(4):
        other = pool.acquire()
        assert other is not failed
        pool.release(other)
    failed.outstanding += 1
    pool.release(failed, failed=True)
    assert failed.cooldown_until > first_cooldown
    failed.outstanding += 1
    pool.release(failed)
    assert {pool.acquire().url for _ in range(2)} == {"a", "b"}


def test_an_endpoint_that_is_marked_as_ill_is_asked_only_if_there_is_no_other() -> None:
    pool = EndpointPool([Endpoint(name, None, None, None, None) for name in "ab"])
    pool.all[0].ill = True
    assert [pool.acquire().url for _ in range(3)] == ["b"] * 3
    pool.release(pool.all[1], failed=True)
    assert pool.acquire(avoid=pool.all[1]).url == "b"
    pool.all[1].ill = True
    assert pool.acquire(avoid=pool.all[1]).url == "a"


@both
def test_tls(ask: Ask) -> None:
    certificate, key = self_signed("localhost")
    server_side = grpc.ssl_server_credentials([(key, certificate)])
    with FakeServer(Reply(["a"]), credentials=server_side) as server:
        port = server.url.rpartition(":")[2]
        trusted = grpc.ssl_channel_credentials(certificate)
        assert ask([f"localhost:{port}"], credentials=trusted).text == "a"
        stranger = grpc.ssl_channel_credentials()
        with pytest.raises(ConnectFailed):
            ask([f"localhost:{port}"], credentials=stranger, retries=Retries(attempts=1))
