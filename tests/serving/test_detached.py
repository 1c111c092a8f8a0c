"""A deployment in the background, by its name alone: serve --detach, ps, stream, gateway, cache, logs, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.errors import PipelineError
from pipeline.machine.process_guard import marked
from pipeline.process_state import SUPERVISOR
from pipeline.serving import status
from pipeline.serving.ports import Ports
from pipeline.serving.status import forget, list_deployments, stop_deployments
from pipeline.triton.running import RunningServer
from tests.support.deployments import ADDRESSES
from tests.support.served import command_line
from tests.support.waiting import wait_for

DEADLINE_S = 240


@dataclass
class Ran:
    """What a command printed."""

    stdout: str
    stderr: str


class Shell:
    """Commands on one store, in this process."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def run(self, *words: str, code: int = 0) -> Ran:
        done = CliRunner().invoke(cli, words)
        stderr, found = done.stderr, done.exit_code
        if isinstance(done.exception, PipelineError):
            stderr, found = f"{stderr}pipeline: {done.exception}", done.exception.exit_code
        assert found == code, (done.stdout, stderr, done.exception)
        return Ran(done.stdout, stderr)

    def serve(self, *words: str, code: int = 0) -> Ran:
        """In a process of its own, which starts another one."""
        command = [sys.executable, "-m", "pipeline.cli.main", "serve", "--detach", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return Ran(done.stdout, done.stderr)

    def ps(self) -> dict[str, dict[str, Any]]:
        return {deployment["name"]: deployment for deployment in json.loads(self.run("ps", "--json").stdout)}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """It leaves no server behind."""
    made = Shell(tmp_path / "store")
    monkeypatch.setenv("PIPELINE_STORE", str(made.store))
    yield made
    records = RunningServer.all(made.store / "running")
    list(
        stop_deployments(
            {name: deployment for name, deployment in records.items() if deployment.alive}, 30, print
        )
    )


@pytest.mark.servers
def test_two_of_one_package_on_one_machine(cpu_package: Path, shell: Shell, tmp_path: Path) -> None:
    """In a store of its own, the second needs nothing of the first, and leaves with it alone."""
    words = ("--package", str(cpu_package), "--no-gateway")
    shell.serve(*words)
    refused = shell.serve(*words, code=2)
    assert "stop that first, or name another --store for a second one" in refused.stderr
    other = ("--store", str(tmp_path / "other"))
    try:
        shell.serve(*words, *other)
        first = shell.ps()["support"]
        (second,) = json.loads(shell.run("ps", "--json", *other).stdout)
        assert first["state"] == second["state"] == "ready"
        assert not {first["grpc_url"], first["metrics_url"]} & {second["grpc_url"], second["metrics_url"]}
        for place in ((), other):
            assert shell.run("stream", "support", "Hi", "--max-tokens", "4", *place).stdout.strip()
    finally:
        shell.run("stop", "support", *other)
    assert shell.ps()["support"]["state"] == "ready"


@pytest.mark.servers
def test_from_detach_to_stop(cpu_package: Path, shell: Shell, tmp_path: Path) -> None:
    moved = tmp_path / "package"
    moved.symlink_to(cpu_package)
    free = Ports.free()
    ports = ("--set", f"triton={{grpc_port: {free.grpc}, metrics_port: {free.metrics}}}")
    words = ("--package", str(moved), "--port", "0", *ports)
    started = shell.serve(*words)
    assert "ready after" in started.stderr
    assert f"stop: pipeline stop support --store {shell.store}" in started.stderr
    assert "support runs as process" in started.stdout
    assert f"stop: pipeline stop support --store {shell.store}" in started.stdout

    found = shell.ps()["support"]
    assert (found["state"], found["reason"]) == ("ready", "")
    assert found["served"]["entry_model"] == "tensorrt_llm_bls"
    assert len(found["served"]["digest"]) == 64
    assert len(found["pids"]["triton"]) >= 1
    assert len(found["pids"]["gateway"]) == 1
    assert found["uptime_s"] > 0
    assert f"process {found['pid']}   " in started.stdout

    # By its name, though there is no recipe of that name anywhere.
    said = shell.run("stream", "support", "Hello", "--max-tokens", "4")
    assert said.stdout.strip()
    assert shell.run("generate", "support", "Hello", "--max-tokens", "4", "--json").stdout.startswith("{")
    described = json.loads(shell.run("gateway", "support", "--dry-run", "--json").stdout)
    assert described["models"][0]["endpoints"] == [found["grpc_socket"]]
    apart = ("gateway", "--package", str(moved), "--endpoint", found["grpc_socket"], "--dry-run", "--json")
    assert json.loads(shell.run(*apart).stdout) == described, "as a compose file starts it"
    with urllib.request.urlopen(f"{found['gateway_url']}/v1/models", timeout=30) as answer:
        assert json.load(answer)["data"][0]["id"] == "support"
    assert "support has no response cache here yet" in shell.run("cache", "stats", "support", code=2).stderr
    assert "running: support" in shell.run("stream", "suport", "Hello", code=2).stderr
    assert shell.ps()["support"]["figures"]["kv_used"] is not None

    refused = shell.serve(*words, code=2)
    assert "support is served already by process" in refused.stderr

    logs = shell.run("logs", "support").stdout
    assert "triton  | " in logs
    assert "Started GRPCInferenceService" in shell.run("logs", "support", "triton", "--lines", "2000").stdout
    follow = [sys.executable, "-m", "pipeline.cli.main", "logs", "support", "-f"]
    following = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
    stopped = shell.run("stop", "support")
    assert f"stopped support (process {found['pid']})" in stopped.stdout
    # Who follows sees the end, and ends with it.
    assert "stopped Triton for support" in following.communicate(timeout=DEADLINE_S)[0]
    assert shell.ps() == {}
    assert "stopped Triton for support" in shell.run("logs", "support", "supervisor").stdout
    assert (
        "no such deployment; nothing is served from this store" in shell.run("stop", "support", code=2).stderr
    )


def test_a_start_that_fails_says_why(cpu_package: Path, shell: Shell) -> None:
    """Also a quiet one; its exit code is that of the process that failed."""
    taken = ("--set", "triton={grpc_port: 7001, metrics_port: 7001}")
    done = shell.serve("--package", str(cpu_package), "--no-gateway", *taken, "-q", code=2)
    assert "must be different ports" in done.stderr
    assert "it ended with exit code 2 before it was ready" in done.stderr
    assert "must be different ports" in (shell.store / "logs" / "support" / "serve.log").read_text()
    assert shell.ps() == {}


def test_a_quiet_start_keeps_reasons_in_the_log(
    cpu_package: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why something was started again is said there, too, so the supervisor itself is not quiet."""
    started: list[tuple[Sequence[str], dict[str, Any]]] = []

    def start(command: Sequence[str], *_: Any, inherit: Sequence[int]) -> SimpleNamespace:
        started.append((command, json.loads(os.pread(inherit[0], 100_000, 0))))
        return SimpleNamespace(pid=1)

    monkeypatch.setattr("pipeline.frontend.serve.start_detached", start)
    shell.run("serve", "--package", str(cpu_package), "--detach", "--no-wait", "-q", "--port", "7")
    ((command, message),) = started
    assert command[-2] == "--detached"
    assert message["listening"] == {"port": 7}
    assert not {"-q", "--quiet"} & set(command)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a supervisor."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def record_of(process: subprocess.Popen[bytes], package: Path, **more: Any) -> RunningServer:
    address = "http://127.0.0.1:1/metrics"
    made = RunningServer.of(ADDRESSES, package, state="ready", **more)
    assert address == made.metrics_url
    own = {"pid": process.pid, "mark": f"{process.pid}-0"}
    return RunningServer(**{**{name: getattr(made, name) for name in made.__slots__}, **own})


def test_what_was_killed_is_shown_once(
    other: subprocess.Popen[bytes], cpu_package: Path, shell: Shell
) -> None:
    running = shell.store / "running"
    record_of(other, cpu_package).write(running, "support")
    assert shell.ps()["support"]["state"] == "ready"
    other.kill()
    other.wait()
    gone = shell.ps()["support"]
    assert (gone["state"], gone["uptime_s"], gone["pids"]) == ("lost", None, {})
    assert f"process {other.pid} has ended without saying why; a unit of `pipeline deploy" in gone["reason"]
    assert shell.ps() == {}
    # One that gave up stays until it is stopped.
    record_of(other, cpu_package).write(running, "support")
    text = json.loads((running / "support.json").read_text())
    (running / "support.json").write_text(
        json.dumps(text | {"state": "failed", "reason": "gave up on the triton"})
    )
    for _ in range(2):
        assert shell.ps()["support"]["state"] == "failed"
    assert "support was failed: gave up on the triton" in shell.run("stop", "support").stdout
    assert shell.ps() == {}


def test_a_supervisor_that_does_not_answer_is_not_called_ready(
    other: subprocess.Popen[bytes], cpu_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens, as one that is stopped (SIGSTOP) does."""
    monkeypatch.setattr(status, "_ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "support.sock"))
        listening.listen()
        record_of(other, cpu_package, control=tmp_path / "support.sock").write(tmp_path, "support")
        (found,) = list_deployments(tmp_path)
    assert (found.state, found.alive) == ("unready", True)
    assert "the supervisor does not answer" in found.reason


def test_what_does_not_stop_is_killed(cpu_package: Path, shell: Shell) -> None:
    """It has ignored SIGTERM; two deployments of one supervisor end together."""
    with subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done"], stdout=subprocess.PIPE
    ) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        waiter = threading.Thread(target=deaf.wait)
        waiter.start()
        for name in ("one", "two"):
            record_of(deaf, cpu_package).write(shell.store / "running", name)
        done = shell.run("stop", "two", "--timeout-s", "0.5", code=1)
        assert f"stopped one, two (process {deaf.pid}, killed after 0.5 s)" in done.stdout
        waiter.join(DEADLINE_S)
        assert deaf.returncode == -signal.SIGKILL
    assert shell.ps() == {}


@pytest.fixture
def left(other: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that `other` has started, and that is stopped."""
    environment = {**os.environ, SUPERVISOR: f"{other.pid}-0"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        # Only now has it the environment of its own.
        wait_for(lambda: process.pid in marked(f"{other.pid}-0", SUPERVISOR), "its start", DEADLINE_S)
        process.send_signal(signal.SIGSTOP)
        # Whoever it is killed by, it is reaped.
        threading.Thread(target=process.wait).start()
        yield process
        process.kill()


def test_what_a_killed_supervisor_left_is_listed_and_ended(
    other: subprocess.Popen[bytes],
    left: subprocess.Popen[bytes],
    cpu_package: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "_LEFT_S", 0.2)
    record_of(other, cpu_package).write(shell.store / "running", "support")
    other.kill()
    other.wait()
    for _ in range(2):
        lost = shell.ps()["support"]
        assert (lost["state"], lost["pids"]) == ("lost", {"remaining": [left.pid]})
        assert f"of its processes {left.pid} still run, which `pipeline stop` ends" in lost["reason"]
        assert "a unit of `pipeline deploy support --target systemd` would start it again" in lost["reason"]
    assert "support was lost: process" in shell.run("stop", "support").stdout
    assert left.wait(DEADLINE_S) == -signal.SIGKILL
    assert shell.ps() == {}


def test_what_cannot_be_ended_is_named(
    other: subprocess.Popen[bytes],
    left: subprocess.Popen[bytes],
    cpu_package: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may wait for a disk or a device, where no signal reaches it."""
    monkeypatch.setattr(status, "_LEFT_S", 0.2)
    monkeypatch.setattr(status, "kill_marked", lambda *_: None)
    record_of(other, cpu_package).write(shell.store / "running", "support")
    reaping = threading.Thread(target=other.wait)
    reaping.start()
    told = shell.run("stop", "support", code=1).stderr
    assert f"support: processes that do not end, even when they are killed: {left.pid}" in told
    reaping.join(DEADLINE_S)
    # It can be stopped again.
    assert shell.ps()["support"]["pids"] == {"remaining": [left.pid]}
    shell.run("stop", "support", code=1)
    assert shell.ps()["support"]["state"] == "lost"
    left.kill()
    wait_for(lambda: not marked(f"{other.pid}-0", SUPERVISOR), "its end", DEADLINE_S)
    shell.run("stop", "support")
    assert shell.ps() == {}


@pytest.mark.servers
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_stop_returns_when_guard_triton_gateway_and_workers_have_ended(
    cpu_package: Path, shell: Shell, number: signal.Signals
) -> None:
    """Of a supervisor that is stopped or was killed, with a guard that is stopped, too."""
    moved = shell.store.parent / "package"
    moved.symlink_to(cpu_package)
    shell.serve("--package", str(moved), "--port", "0", "--set", "gateway.workers=2")
    found = shell.ps()["support"]
    everything = marked(found["mark"], SUPERVISOR)
    names = {pid: command_line(pid) for pid in everything}
    (guard,) = (pid for pid, line in names.items() if "process_guard" in line)
    parts = ("tritonserver", "python_backend_stub", "gateway.front", " gateway ", "--worker", "text_server")
    assert all(any(part in line for line in names.values()) for part in parts), names
    os.kill(guard, signal.SIGSTOP)
    os.kill(found["pid"], number)
    shell.run("stop", "support", "--timeout-s", "1", code=1 if number == signal.SIGSTOP else 0)
    assert marked(found["mark"], SUPERVISOR) == []
    assert shell.ps() == {}


def test_deployments_of_one_supervisor_have_its_log(
    other: subprocess.Popen[bytes], cpu_package: Path, shell: Shell
) -> None:
    for name in ("one", "two"):
        control = shell.store / "running" / "one.sock"
        record_of(other, cpu_package, control=control).write(shell.store / "running", name)
    (shell.store / "logs" / "one").mkdir(parents=True)
    (shell.store / "logs" / "one" / "serve.log").write_text("starting Triton\nready after 3 s\n")
    assert shell.run("logs", "two", "supervisor", "--lines", "1").stdout == "ready after 3 s\n"
    assert "two has no such log here" in shell.run("logs", "two", "gateway", code=2).stderr


def test_a_record_is_not_forgotten_while_its_lock_is_held(
    other: subprocess.Popen[bytes], cpu_package: Path, tmp_path: Path
) -> None:
    from pipeline.store import lock

    record_of(other, cpu_package).write(tmp_path, "support")
    other.kill()
    other.wait()
    (found,) = list_deployments(tmp_path)
    held = lock.exclusive(tmp_path / "support.lock")
    assert held is not None
    forget(tmp_path, found)
    assert (tmp_path / "support.json").exists(), "it is being served again"
    held.release()
    forget(tmp_path, found)
    assert not (tmp_path / "support.json").exists()
