"""Servers behind a DNS name, which come and go while requests are under way: both clients alike."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from pipeline.client import Client, ConnectFailed, Refused, Retries
from pipeline.client.testing import FakeServer, Received, Reply
from tests.support.certificates import self_signed
from tests.support.client_faces import both_faces
from tests.support.names import Names, use_names
from tests.support.waiting import wait_for

NAME = "replicas.test"
LONG = "long"


@dataclass
class Replicas:
    """Servers with one port at several addresses of loopback, and the name that some of them have."""

    names: Names
    servers: list[FakeServer] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"dns:{NAME}:{self.servers[0].port}"

    def announce(self, *numbers: int) -> None:
        """Let the name have the addresses of these servers."""
        self.names.addresses[NAME] = [self.servers[number].url.partition(":")[0] for number in numbers]

    def answer(self, received: Received) -> Reply:
        if LONG not in received.prompt:
            return Reply(["a"])
        return HeldReply(["begun"] + ["."] * 400, self.go)


class HeldReply(Reply):
    """Begins at once, and goes on slowly until an event is set."""

    def __init__(self, chunks: Sequence[str], go: threading.Event) -> None:
        super().__init__(chunks)
        object.__setattr__(self, "_go", go)

    def __getattribute__(self, name: str) -> Any:
        if name == "delay_s":
            return 0.0 if object.__getattribute__(self, "_go").is_set() else 0.1
        return super().__getattribute__(name)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    made = Replicas(Names())
    use_names(made.names, monkeypatch.setattr)
    with ExitStack() as stack:
        for number in (1, 2, 3):
            port = made.servers[0].port if made.servers else 0
            server = FakeServer(made.answer, host=f"127.0.0.{number}", port=port)
            made.servers.append(stack.enter_context(server))
        yield made
        made.go.set()


@both_faces
def test_replicas_come_and_go_without_a_failed_request(face: Callable[..., Any], replicas: Replicas) -> None:
    replicas.announce(0, 1)
    first, second, third = replicas.servers
    # No request is tried twice: nothing that fails could go unnoticed.
    once = Retries(attempts=1)
    with face(replicas.url, spread="least-load", retries=once) as client, ThreadPoolExecutor(4) as threads:
        stop = threading.Event()

        def keep_asking() -> int:
            asked = 0
            while not stop.is_set():
                assert client.generate("Hi", max_tokens=4).text == "a"
                asked += 1
            return asked

        asking = [threads.submit(keep_asking) for _ in range(3)]
        try:
            wait_for(lambda: bool(first.requests and second.requests), "both were asked")
            assert not third.requests
            # A long answer on each; one of them then leaves the name.
            long = threads.submit(client.generate, LONG, max_tokens=10_000)

            def begun() -> list[FakeServer]:
                return [
                    server for server in (first, second) if any(LONG in ask.prompt for ask in server.requests)
                ]

            wait_for(lambda: bool(begun()), "the long answer began")
            (leaving,) = begun()
            replicas.announce(1 if leaving is first else 0, 2)
            wait_for(lambda: bool(third.requests), "the new one was asked")
            before = len(leaving.requests)
            seen = len(third.requests)
            wait_for(lambda: len(third.requests) > seen + 20, "more requests")
            assert len(leaving.requests) <= before + 3, "but for those that were on their way"
            # It drains: what it has begun, it ends.
            replicas.go.set()
            assert long.result(60).text == "begun" + "." * 400
        finally:
            stop.set()
        assert all(asked.result(60) for asked in asking)


@both_faces
def test_a_name_without_an_address_fails_soon_and_is_used_when_it_has_one(
    face: Callable[..., Any], replicas: Replicas
) -> None:
    replicas.announce()
    with (
        face(replicas.url, retries=Retries(attempts=1)) as client,
        pytest.raises(ConnectFailed, match=rf"there is no server to ask: {replicas.url}: Name or service"),
    ):
        client.generate("Hi", max_tokens=4)
    with (
        face(replicas.url, retries=Retries(attempts=1, wait_s=60)) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(client.generate, "Hi", max_tokens=4)
        replicas.announce(2)
        assert asked.result(60).text == "a"


@both_faces
def test_a_name_that_loses_its_addresses_keeps_those_that_it_had(
    face: Callable[..., Any], replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    replicas.announce(0)
    with face(replicas.url) as client:
        assert client.generate("Hi", max_tokens=4).text == "a"
        replicas.announce()
        wait_for(lambda: f"{replicas.url}: Name or service not known; asked on" in caplog.text, "a warning")
        assert client.generate("Hi", max_tokens=4).text == "a"
        replicas.announce(1)
        wait_for(lambda: client.generate("Hi", max_tokens=4) and replicas.servers[1].requests, "the new one")


def threads_of_names() -> int:
    return sum(thread.name == "pipeline-client-dns" for thread in threading.enumerate())


@both_faces
def test_nobody_asks_dns_for_a_client_that_is_closed(face: Callable[..., Any], replicas: Replicas) -> None:
    replicas.announce(0)
    with face(replicas.url) as client:
        client.generate("Hi", max_tokens=4)
        assert threads_of_names()
    wait_for(lambda: not threads_of_names(), "the end of the thread")


def test_nobody_asks_dns_for_a_client_that_was_forgotten(replicas: Replicas) -> None:
    replicas.announce(0)
    client = Client(replicas.url)
    client.generate("Hi", max_tokens=4)
    del client
    gc.collect()
    wait_for(lambda: not threads_of_names(), "the end of the thread")


@both_faces
def test_the_certificate_of_a_server_is_that_of_the_name(face: Callable[..., Any]) -> None:
    """By the DNS of this machine: localhost is an address that no certificate here has."""
    certificate, key = self_signed("localhost")
    with FakeServer(Reply(["a"]), credentials=grpc.ssl_server_credentials([(key, certificate)])) as server:
        trusted = grpc.ssl_channel_credentials(certificate)
        with face(f"dns:localhost:{server.port}", credentials=trusted) as client:
            assert client.generate("Hi", max_tokens=4).text == "a"


@pytest.mark.parametrize(
    "url", ["dns:triton", "dns::8001", "dns:triton:http", "dns:triton:70000", "dns:a/b:1"]
)
def test_what_is_no_name_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="give dns:NAME:PORT"):
        Client([url, "localhost:8001"])
