"""A gateway in a process of its own is told to stop: what runs may finish, but not for ever."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest

from pipeline.client.testing import Reply
from tests.gateway.conftest import Upstream
from tests.support.waiting import wait_for

PROGRAM = """
import sys
from pipeline.gateway.app import Gateway
from pipeline.gateway.app import GatewayServer
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import tiny

server = GatewayServer(Gateway({"tiny": tiny(sys.argv[1])}, Tenants()), "127.0.0.1", 0, drain_s=int(sys.argv[2]))
server.on_start = lambda: print(server.port, flush=True)
server.run()
"""
QUESTION = [{"role": "user", "content": "Hi"}]


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
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=30) as client:
                yield Process(popen, port, client)
        finally:
            popen.kill()


def test_streams_finish_after_sigterm_and_nothing_new_is_taken() -> None:
    with Upstream(Reply(["a"] * 20, delay_s=0.1)) as upstream, running(upstream, drain_s=30) as gateway:
        stream = gateway.client.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
        next(stream)
        gateway.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: not gateway.listens(), "end of listening")
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert gateway.popen.wait(20) in (0, -signal.SIGTERM)
        assert upstream.requests[0].finished.is_set()


def test_what_takes_longer_than_the_deadline_is_broken_off() -> None:
    with Upstream(Reply(["a"] * 600, delay_s=0.1)) as upstream, running(upstream, drain_s=1) as gateway:
        stream = gateway.client.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
        next(stream)
        gateway.popen.send_signal(signal.SIGTERM)
        with pytest.raises((httpx.TransportError, openai.APIError)):
            list(stream)
        assert gateway.popen.wait(20) in (0, -signal.SIGTERM)
        assert upstream.requests[0].cancelled.wait(10)
