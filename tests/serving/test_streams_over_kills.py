"""Streams through a gateway whose engine is killed in their middle: with the engine's return they are complete."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.tenants import Tenants
from pipeline.machine.processes import processes_below
from pipeline.recipe import load_recipe
from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers


@contextmanager
def gateway_for(server: TritonServer, package: Path) -> Iterator[str]:
    """URL of a gateway in front of a server."""
    recipe, settings = load_recipe("tiny-cpu", ["name=support"]), GatewaySettings(max_wait_s=120.0)
    model = ServedModel.from_package(recipe, package, [server.grpc_url], settings=settings)
    gateway = GatewayServer(Gateway({"support": model}, Tenants()), "127.0.0.1", 0, drain_s=2)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: gateway.started, "a gateway")
        yield gateway.url
    finally:
        gateway.should_exit = True
        thread.join(20)


def pieces(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def kill_engine(server: TritonServer) -> None:
    below = {process.pid: process.name for pid in server.pids for process in processes_below(pid)}
    (engine,) = [pid for pid, name in below.items() if name == "tensorrt_llm"]
    os.kill(engine, signal.SIGKILL)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 1.3, "seed": 11, "frequency_penalty": 0.4, "logprobs": 0}],
    ids=["greedy", "sampled"],
)
def test_a_killed_engine_costs_a_pause(package: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    body = {
        "model": "support", "prompt": TURN.format(QUESTIONS[2]), "max_tokens": 600, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    with (
        TritonServer.of_package(package, log_file=tmp_path / "log") as server,
        gateway_for(server, package) as url,
        httpx.Client(base_url=url, timeout=180, trust_env=False) as client,
    ):

        def ask(kill_after: int | None = None) -> tuple[str, list[float], dict[str, Any]]:
            text, log_probs, usage, count = "", list[float](), {}, 0
            with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                for event in pieces(answer):
                    assert "error" not in event, event
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        text += choice["text"]
                        log_probs += (choice["logprobs"] or {}).get("token_logprobs", ())
                    count += 1
                    if count == kill_after:
                        kill_engine(server)
                        # As its supervisor does, at some time.
                        server.stop(at_once=True)
                        server.start()
            return text, log_probs, usage

        def resumed() -> int:
            (line,) = [
                line for line in client.get("/metrics").text.splitlines() if 'outcome="resumed"' in line
            ]
            return int(float(line.split()[-1]))

        expected = ask()
        assert expected[2]["completion_tokens"] == 600
        for kill_after in (1, 40):
            before = resumed()
            # An engine that is fast enough has said all before it is killed.
            for _ in range(10):
                text, log_probs, usage = ask(kill_after)
                assert (text, usage) == (expected[0], expected[2])
                assert log_probs == pytest.approx(expected[1], abs=1e-3)
                if resumed() > before:
                    break
            assert resumed() > before
        assert 'event="quarantined",model="support"} 0.0' in client.get("/metrics").text
