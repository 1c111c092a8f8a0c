"""Clients that ask too much, send too slowly or do not read: they are refused, and others do not wait for them."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.client.testing import FakeServer, Received, Reply
from pipeline.gateway.client_connection import ConnectionLimits
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

# A process of its own: what its clients do in this one does not hold it up.
PROGRAM = """
import sys
from tokenizers import Tokenizer
from pipeline.gateway.app import Gateway
from pipeline.client import PromptLimit
from pipeline.gateway.app import GatewayServer
from pipeline.gateway.tenants import Tenants
from tests.support.scripted_model import tiny

served = tiny(sys.argv[1], places=3, max_waiting=100)
served.prompt_limit = PromptLimit(Tokenizer.from_file(sys.argv[2]), max_tokens=1_000_000)
served.max_output_tokens = 1_000_000
server = GatewayServer(Gateway({"tiny": served}, Tenants()), "127.0.0.1", 0, drain_s=1)
server.on_start = lambda: print(server.port, flush=True)
server.run()
"""
TOKENIZER = Path(__file__).parents[2] / "recipes/checkpoints/support-target/tokenizer.json"
PATH = "/v1/completions"


def answer(received: Received) -> Reply:
    """About 3.5 MB at once for "long", else 40 words in 0.4 s."""
    return Reply(["x" * 1000] * 3500) if received.prompt == "long" else Reply(["word "] * 40, delay_s=0.01)


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeServer]:
    with FakeServer(answer) as server:
        yield server


@pytest.fixture(scope="module")
def port(upstream: FakeServer) -> Iterator[int]:
    """Of a gateway of three places, whose tokenizer has to count each prompt."""
    line = [sys.executable, "-c", PROGRAM, upstream.url, str(TOKENIZER)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def request(
    port: int, prompt: str, *, receive_buffer: int | None = None, stream: bool = True
) -> socket.socket:
    """A socket on which a completion has been asked for."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "stream": stream}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    client = socket.socket()
    client.settimeout(60)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", port))
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def everything(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


def stream_s(port: int, prompt: str) -> float:
    """How long a short answer takes."""
    began = time.monotonic()
    assert b"[DONE]" in everything(request(port, prompt))
    return time.monotonic() - began


def median_s(port: int) -> list[float]:
    """Of answers to a short prompt, and to one of 12 KB."""
    return [
        statistics.median(stream_s(port, prompt) for _ in range(3)) for prompt in ("short", "short " * 2000)
    ]


@contextmanager
def long_prompts(port: int, _: FakeServer) -> Iterator[None]:
    """Somebody asks one question of four million characters after the other."""
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            assert b"context_length_exceeded" in everything(request(port, "parcel where is my " * 205_000))

    attacker = threading.Thread(target=attack)
    attacker.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        over.set()
        attacker.join()


@contextmanager
def no_readers(port: int, upstream: FakeServer) -> Iterator[None]:
    """As many as the model has places have asked for a long answer, and read nothing of it."""
    before = len(upstream.requests)

    def finished() -> bool:
        return (
            sum(
                request.finished.is_set()
                for request in upstream.requests[before:]
                if request.prompt == "long"
            )
            == 3
        )

    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(request(port, "long", receive_buffer=4096))
        wait_for(finished, "the end of three generations", 60)
        yield


@pytest.mark.parametrize("attack", [long_prompts, no_readers])
def test_others_take_at_most_twice_as_long(
    port: int, upstream: FakeServer, attack: Callable[[int, FakeServer], Any]
) -> None:
    rounds = []
    # Other programs take the machine now and then; what an attack costs is there each time.
    for _ in range(5):
        alone = median_s(port)
        with attack(port, upstream):
            beside = median_s(port)
        rounds.append(max(with_it / without for with_it, without in zip(beside, alone, strict=True)))
        if rounds[-1] <= 2:
            return
    pytest.fail(f"times as long as without: {rounds}")


# What follows is about one connection each; servers are of this process, and their limits are short.


def connect(running: Running) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", running.server.port))
    client.settimeout(20)
    return client


def told(client: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer, after which the server hangs up."""
    head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "headers",
    [
        b"x: y\r\n" * 200 + b"\r\n",
        b"x: " + b"y" * 100_000 + b"\r\n\r\n",
        b"x: " + b"y" * 100_000,
        b"x: y\r\ny: " + b"y" * 100_000,
    ],
    ids=["many", "large", "without an end", "the second without an end"],
)
def test_headers_are_limited(refusing: Running, headers: bytes) -> None:
    client = connect(refusing)
    client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + headers)
    status, error = told(client)
    assert status == 431
    assert "128 headers and 65536 bytes" in error["message"]


def test_headers_and_bodies_that_do_not_come_are_given_up(start: Start) -> None:
    running = start(limits=ConnectionLimits(header_s=0.5, body_s=1.0))
    headers = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    for begin in (headers, headers + b"content-length: 9\r\n\r\n{"):
        client = connect(running)
        client.sendall(begin)
        status, error = told(client)
        assert (status, "did not come" in error["message"]) == (408, True)
    silent = connect(running)
    assert everything(silent) == b""
    # a request that takes its time is none of them
    assert http.get(f"{running.url}/v1/models").status_code == 200
    assert not running.upstream.requests


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_is_hung_up_on(start: Start, stream: bool) -> None:
    """While the model goes on answering, and when the whole answer is there."""
    running = start(Reply(["x" * 1000] * 4000), limits=ConnectionLimits(write_s=0.5))
    with request(running.server.port, "long", receive_buffer=4096, stream=stream) as client:
        wait_for(lambda: bool(running.upstream.requests), "the generation")
        wait_for(lambda: connections(running) == 0, "the end of the connection")
        wait_for(lambda: running.served.queue.running == 0, "the end of the generation")
        with pytest.raises(ConnectionResetError):
            everything(client)


def connections(running: Running) -> int:
    return len(running.server.server_state.connections)


def test_connections_are_capped_and_no_client_keeps_others_out(start: Start) -> None:
    running = start(Reply(["x"] * 500, delay_s=0.02), limits=ConnectionLimits(connections=4), places=8)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(running)) for _ in range(10)]
        wait_for(lambda: connections(running) == 4, "four connections")
        assert http.get(f"{running.url}/v1/models").status_code == 200
        assert everything(silent[0]) == b""
        for _ in range(4):
            stack.enter_context(request(running.server.port, "short")).recv(1)
        status, error = told(connect(running))
        assert (status, error["code"]) == (503, "overloaded")


def test_what_is_refused_is_charged(start: Start) -> None:
    tenant = Tenant("", TenantLimits(requests_per_minute=3, tokens_per_minute=200), clock=lambda: 0.0)
    running = start(tenants=Everybody(tenant))
    url = f"{running.url}/v1/completions"
    asked = {"model": "tiny", "max_tokens": 20}

    def ask(**fields: Any) -> tuple[int, str]:
        answer = http.post(url, json=asked | fields)
        return answer.status_code, answer.json().get("error", {}).get("code")

    assert ask(prompt="word " * 190) == (400, "context_length_exceeded")
    assert ask(prompt="word") == (429, "rate_limit_exceeded"), "190 of its 200 tokens are used up"
    assert ask(prompt=1)[0] == 400
    assert ask(prompt="word") == (429, "rate_limit_exceeded"), "and all of its requests"
    assert not running.upstream.requests


class Everybody(Tenants):
    """One tenant, without a key."""

    def __init__(self, tenant: Tenant) -> None:
        super().__init__()
        self._everybody = tenant
