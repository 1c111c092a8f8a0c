"""A gateway of workers whose clients each have a worker of their choice, and a model that holds long answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from prometheus_client import parser

from pipeline.client.testing import Ending, Received, Reply
from tests.support.http_clients import http_client
from tests.support.names import HostsFile
from tests.support.scripted_model import Upstream
from tests.support.worker_gateway import WorkerGateway

MINUTE = 30
KEYS = f"""tenants:
  shop: {{keys: [sk-shop], limits: {{requests_per_minute: {MINUTE}}}}}
  three: {{keys: [sk-three], limits: {{concurrency: 3}}}}
  free: {{keys: [sk-free]}}
  bad: {{keys: [sk-bad]}}
"""
NAME = "replicas.test"
LONG = "long"  # a question whose answer goes on until `Served.let_go`
LOST_S = 60.0
HELD_S, HELD_CHUNKS = 90.0, 240  # a long answer, when it is not let go


@dataclass(slots=True)
class Served:
    """A gateway of two workers, and a client whose connection each of them has."""

    gateway: WorkerGateway
    upstream: Holding
    stack: ExitStack
    hosts: HostsFile

    def client(self, worker: int) -> httpx.Client:
        """A client whose connection the worker with that process id has accepted."""
        while True:
            client = self.stack.enter_context(http_client(base_url=self.gateway.url, timeout=LOST_S))
            # A new connection each time, until this worker is the one that takes it.
            with client.stream("GET", "/healthz") as answer:
                port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                answer.read()
            with suppress(psutil.Error):
                connections = psutil.Process(worker).net_connections("tcp")
                if any(one.raddr and one.raddr.port == port for one in connections):
                    return client
            client.close()

    def clients(self) -> list[httpx.Client]:
        """One of each worker."""
        return [self.client(worker) for worker in self.gateway.workers()]

    def metrics(self, client: httpx.Client) -> dict[tuple[Any, ...], float]:
        page = client.get("/metrics").text
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in parser.text_string_to_metric_families(page)
            for sample in family.samples
        }

    def let_go(self) -> None:
        """End the long answers."""
        self.upstream.let_go()


class Holding(Upstream):
    """Answers at once, but for `LONG` questions: their answers begin at once, and end when they are let go."""

    def __init__(self, **named: Any) -> None:
        super().__init__(self.script, **named)
        self._go = threading.Event()

    def script(self, asked: Received) -> Reply:
        if "poison" in asked.prompt:
            return Reply([], ending=Ending.LOST)
        if "broken" in asked.prompt:
            return self._migrating(asked)
        if LONG not in asked.prompt:
            return Reply([f"{len(asked.prompt.split())} words"])
        return held(self._go)

    @staticmethod
    def _migrating(asked: Received) -> Reply:
        """Lose the server after two of four tokens, and go on from there when asked again."""
        before = len(asked.tensors.get("prior_output_ids", ()))
        ending = Ending.EMPTY if before else Ending.LOST
        pieces = [f"{number} " for number in range(before, before + 2)]
        return Reply(pieces, token_ids=range(before, before + 2), ending=ending)

    def let_go(self) -> None:
        """End the long answers; those that begin later wait again."""
        self._go.set()
        self._go = threading.Event()

    def streams(self) -> int:
        """Long answers under way."""
        long = [one for one in self.requests if LONG in one.prompt]
        return sum(not (one.finished.is_set() or one.cancelled.is_set()) for one in long)


def held(go: threading.Event) -> Reply:
    """An answer that begins at once, and goes on slowly until `go` is set."""

    class HeldReply(Reply):
        def __getattribute__(self, name: str) -> Any:
            if name == "delay_s":
                return 0.0 if go.is_set() else HELD_S / HELD_CHUNKS
            return super().__getattribute__(name)

    return HeldReply(["begun ", *["word "] * HELD_CHUNKS])


def chat(question: str, key: str = "sk-free", **fields: Any) -> dict[str, Any]:
    """Arguments of a request of httpx."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], **fields}
    return {"url": "/v1/chat/completions", "json": body, "headers": {"Authorization": f"Bearer {key}"}}


def begin(served: Served, client: httpx.Client, key: str = "sk-free") -> tuple[httpx.Response, Iterator[str]]:
    """Begin a long stream, and wait for its first words."""
    request = client.build_request("POST", **chat(LONG, key, stream=True, cache=False))
    answer = client.send(request, stream=True)
    served.stack.callback(answer.close)
    assert answer.status_code == 200, answer.read()
    lines = answer.iter_lines()
    assert "begun" in next(line for line in lines if "begun" in line)
    return answer, lines
