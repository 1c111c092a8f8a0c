"""A gateway in a process of its own is told to stop: what runs may finish, but not for ever."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from pipeline.client.testing import Ending, Received, Reply
from tests.support.http_clients import openai_client
from tests.support.scripted_model import Upstream
from tests.support.waiting import wait_for

PROGRAM = """
import sys
from pipeline.gateway.app import Gateway
from pipeline.gateway.app import GatewayServer
from pipeline.gateway.tenants import Tenants
from tests.support.scripted_model import tiny

server = GatewayServer(Gateway({"tiny": tiny(sys.argv[1])}, Tenants()), "127.0.0.1", 0, drain_s=int(sys.argv[2]))
server.on_start = lambda: print(server.port, flush=True)
server.run()
"""


@dataclass
class Process:
    popen: subprocess.Popen[str]
    port: int
    client: openai.OpenAI

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@contextmanager
def running(upstream: Upstream, drain_s: int) -> Iterator[Process]:
    command = [sys.executable, "-c", PROGRAM, upstream.url, str(drain_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stdout is not None
            port = int(popen.stdout.readline())
            with openai_client(f"http://127.0.0.1:{port}", timeout_s=30) as client:
                yield Process(popen, port, client)
        finally:
            popen.kill()


def test_streams_finish_after_sigterm_or_are_broken_off_at_the_deadline() -> None:
    """Nothing new is taken meanwhile."""

    def reply(received: Received) -> Reply:
        if "long" in received.prompt:
            return Reply(["a"], ending=Ending.HANG)
        return Reply(["a"] * 10, delay_s=0.05)

    def ask(client: openai.OpenAI, text: str) -> openai.Stream[Any]:
        question: Any = [{"role": "user", "content": text}]
        stream = client.chat.completions.create(model="tiny", messages=question, stream=True)
        next(stream)
        return stream

    with Upstream(reply) as upstream, running(upstream, drain_s=3) as gateway:
        short, long = ask(gateway.client, "short"), ask(gateway.client, "long")
        gateway.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: not gateway.listens(), "end of listening")
        assert list(short)[-1].choices[0].finish_reason == "stop"
        with pytest.raises((httpx.TransportError, openai.APIError)):
            list(long)
        assert gateway.popen.wait(20) in (0, -signal.SIGTERM)
        for received in upstream.requests:
            assert (received.cancelled if "long" in received.prompt else received.finished).wait(10)
