"""`pipeline rollout` as a command: Ctrl-C in its middle, and the supervisor killed in its middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipeline.triton.running import RunningServer
from tests.e2e.conftest import Build, pipeline
from tests.support.command import Command, pasted
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow


@contextmanager
def serving(store: Path, log: Path) -> Iterator[tuple[Command, RunningServer]]:
    line = "pipeline serve tiny-cpu --port 0"
    with Command(pasted(line), log, {"PIPELINE_STORE": str(store)}) as command:
        wait_for(lambda: ready(store) is not None or command.process.poll() is not None, "ready", 240)
        record = ready(store)
        assert record is not None, command.said
        yield command, record


def ready(store: Path) -> RunningServer | None:
    return RunningServer.find(store / "running", "tiny-cpu", states=("ready",))


def below(pid: int) -> list[psutil.Process]:
    """All processes that a supervisor has started."""
    return psutil.Process(pid).children(recursive=True)


def test_cancelled_killed_and_done(build: Build, store: Path, tmp_path: Path) -> None:
    first = Path(build("tiny-cpu")["artifact"])
    other = Path(build("tiny-cpu", "limits.max_output_tokens=64")["artifact"])
    environment = {"PIPELINE_STORE": str(store)}
    line = f"pipeline rollout tiny-cpu --package {other}"
    with serving(store, tmp_path / "first.log") as (server, record):
        before = {process.pid for process in below(record.pid)}
        with Command(pasted(line), tmp_path / "cancelled.log", environment) as command:
            command.wait_for("starting Triton", 120)
            assert command.stop(signal.SIGINT) == 130
            assert f"tiny-cpu is served from {first}" in command.said
        assert ready(store) == record
        assert {process.pid for process in below(record.pid)} == before, (
            "the new Triton is gone, the old one is not"
        )
        assert pipeline("generate", "tiny-cpu", "Hi", "--max-tokens", "4", store=store).returncode == 0
        with Command(pasted(line), tmp_path / "killed.log", environment) as command:
            command.wait_for("starting Triton", 120)
            wait_for(lambda: len(below(record.pid)) > len(before), "the new Triton was started")
            everything = below(record.pid)
            os.kill(record.pid, signal.SIGKILL)
            assert command.process.wait(60) == 1
            assert "ended before it was done" in command.said
        server.process.wait(30)
        wait_for(lambda: not any(process.is_running() for process in everything), "all of it ended", 60)
    with serving(store, tmp_path / "second.log") as (_, record):
        assert record.deployment.parent == first, "what the recipe says"
        done = pipeline("rollout", "tiny-cpu", "--package", str(other), "--json", store=store)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["package"] == str(other)
        assert "golden questions: 4 of 4 right" in done.stderr
        refused = pipeline("rollout", "tiny-cpu", "--package", str(other), store=store)
        assert (refused.returncode, "already" in refused.stderr) == (2, True)
