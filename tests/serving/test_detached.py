"""A deployment in the background, by its name alone: serve --detach, ps, stream, gateway, cache, logs, stop."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.errors import PipelineError
from pipeline.serving import status
from pipeline.serving.log_files import LogLimit, LogTail, rotate
from pipeline.serving.ports import Ports
from pipeline.serving.status import forget, list_deployments, stop_deployments
from pipeline.triton.running import RunningServer

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
        return {one["name"]: one for one in json.loads(self.run("ps", "--json").stdout)}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """It leaves no server behind."""
    made = Shell(tmp_path / "store")
    monkeypatch.setenv("PIPELINE_STORE", str(made.store))
    yield made
    records = RunningServer.all(made.store / "running")
    list(stop_deployments({name: one for name, one in records.items() if one.alive}, 30, print))


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


def test_from_detach_to_stop(cpu_package: Path, shell: Shell, tmp_path: Path) -> None:
    moved = tmp_path / "package"
    moved.symlink_to(cpu_package)
    free = Ports.free()
    ports = (f"--grpc-port={free.grpc}", f"--metrics-port={free.metrics}")
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
    assert (
        "Started GRPCInferenceService" in shell.run("logs", "support", "--triton", "--lines", "2000").stdout
    )
    follow = [sys.executable, "-m", "pipeline.cli.main", "logs", "support", "-f"]
    following = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
    stopped = shell.run("stop", "support")
    assert f"stopped support (process {found['pid']})" in stopped.stdout
    # Who follows sees the end, and ends with it.
    assert "stopped Triton for support" in following.communicate(timeout=DEADLINE_S)[0]
    assert shell.ps() == {}
    assert "stopped Triton for support" in shell.run("logs", "support", "--supervisor").stdout
    assert (
        "no such deployment; nothing is served from this store" in shell.run("stop", "support", code=2).stderr
    )


def test_a_start_that_fails_says_why(cpu_package: Path, shell: Shell) -> None:
    """Its exit code is that of the process that failed."""
    taken = "--grpc-port=7001", "--metrics-port=7001"
    done = shell.serve("--package", str(cpu_package), "--no-gateway", *taken, code=2)
    assert "must be different ports" in done.stderr
    assert "it ended with exit code 2 before it was ready" in done.stderr
    assert shell.ps() == {}


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a supervisor."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def record_of(process: subprocess.Popen[bytes], package: Path, **more: Any) -> RunningServer:
    address = "http://127.0.0.1:1/metrics"
    made = RunningServer.of(_Nowhere(), package, state="ready", **more)
    assert address == made.metrics_url
    return RunningServer(**{**{name: getattr(made, name) for name in made.__slots__}, "pid": process.pid})


class _Nowhere:
    grpc_socket = ""
    grpc_url, http_url, metrics_url = "127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:1/metrics"


def test_what_was_killed_is_shown_once(
    other: subprocess.Popen[bytes], cpu_package: Path, shell: Shell
) -> None:
    running = shell.store / "running"
    record_of(other, cpu_package).write(running, "support")
    assert shell.ps()["support"]["state"] == "ready"
    other.kill()
    other.wait()
    gone = shell.ps()["support"]
    assert (gone["state"], gone["uptime_s"]) == ("gone", None)
    assert f"process {other.pid} has ended without saying why" in gone["reason"]
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


def test_deployments_of_one_supervisor_have_its_log(
    other: subprocess.Popen[bytes], cpu_package: Path, shell: Shell
) -> None:
    for name in ("one", "two"):
        control = shell.store / "running" / "one.sock"
        record_of(other, cpu_package, control=control).write(shell.store / "running", name)
    (shell.store / "logs" / "one").mkdir(parents=True)
    (shell.store / "logs" / "one" / "serve.log").write_text("starting Triton\nready after 3 s\n")
    assert shell.run("logs", "two", "--supervisor", "--lines", "1").stdout == "ready after 3 s\n"
    assert "two has no such log here" in shell.run("logs", "two", "--gateway", code=2).stderr


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


def test_a_log_is_followed_over_rotations(tmp_path: Path) -> None:
    file = tmp_path / "triton.log"
    file.write_text("".join(f"{number}\n" for number in range(10)))
    tail = LogTail({"triton": file, "gateway": tmp_path / "gateway.log"}, 3)
    assert list(tail.read()) == [("triton", "7"), ("triton", "8"), ("triton", "9")]
    with file.open("a") as writing:
        writing.write("half")
        writing.flush()
        assert list(tail.read()) == []
        rotate(file)
        writing.write(" a line\nlast\n")
    file.write_text("new\n")
    (tmp_path / "gateway.log").write_text("first\nsecond")
    assert list(tail.read()) == [
        ("triton", "half a line"), ("triton", "last"), ("triton", "new"), ("gateway", "first"),
    ]  # fmt: skip
    assert list(tail.close()) == [("gateway", "second")]


def test_a_log_that_is_written_all_the_time_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Its writer goes on, whoever follows it reads on, and what was in it is kept for a while."""
    file = tmp_path / "gateway.log"
    limit, tail = LogLimit(file, most=100, interval_s=0), LogTail({"gateway": file}, 0)
    with file.open("ab") as writing:
        for number in range(200):
            writing.write(f"line {number:4}\n".encode())
            writing.flush()
            limit.check()
            assert file.stat().st_size <= 100
            assert len(list(tail.read())) <= 1
        writing.write(b"the last\n")
        writing.flush()
    assert [*tail.read(), *tail.close()][-1] == ("gateway", "the last")
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["gateway.log", *(f"gateway.log.{number}" for number in range(1, 6))]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("gateway.log.*"))
    text = "".join((tmp_path / name).read_text() for name in (*sorted(kept[1:], reverse=True), "gateway.log"))
    numbers = [int(line[5:]) for line in text.splitlines()[:-1]]
    assert numbers == list(range(numbers[0], 200))
