"""No process in the path of requests ends, or is not started, because a log cannot be written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.frontend.process import CHILD
from pipeline.gateway.http_server import bound_sockets
from pipeline.gateway.settings import GatewaySettings, GatewayStart, ModelSources
from pipeline.machine import process_guard
from pipeline.serving.control import ask
from pipeline.serving.gateway_process import GatewayLaunch, GatewayProcess
from pipeline.serving.log_files import LogLimit, LogTail, open_log, rotate
from pipeline.serving.ports import Ports
from pipeline.serving.probe import is_ready
from pipeline.serving.server import TritonServer
from pipeline.settings import Settings
from pipeline.triton.running import RunningServer
from tests.support.served import front_pid
from tests.support.waiting import wait_for

WAIT_S = 120.0
FULL = Path("/dev/full")
# Prints more than a buffer holds before it listens, and at each request.
CHATTY_GATEWAY = """
import http.server, socket, sys
from pipeline.dropping_output import drop_unwritable_output
drop_unwritable_output()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        print("x" * 100_000)
print("x" * 100_000, flush=True)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "none", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room for a byte or a file."""
    for number in range(96):
        with contextlib.suppress(OSError):
            (folder / f"fill{number}").write_bytes(b"." * 65536)


@pytest.fixture
def full_disk(disk: Path) -> Path:
    fill(disk)
    return disk


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def chat(text: str) -> dict[str, Any]:
    return {"model": "support", "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def test_a_gateway_whose_output_is_full_answers(server: TritonServer, package: Path) -> None:
    """Banner, access log, prompts, workers and what reads long texts: none of them can write a byte."""
    with bound_sockets("127.0.0.1", 0) as sockets, FULL.open("wb") as full:
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        start = GatewayStart(
            sources=ModelSources(package=package, endpoints=(("", server.target),)),
            settings=GatewaySettings(workers=2, log_prompts="full", log_format="json", drain_s=5),
            sockets=(sockets[0].fileno(),),
        )
        sockets[0].listen()
        with os.fdopen(start.to_descriptor()) as message:
            gateway = subprocess.Popen(
                (*CHILD, str(message.fileno())), stdin=subprocess.DEVNULL, stdout=full, stderr=full,
                pass_fds=(sockets[0].fileno(), message.fileno()),
            )  # fmt: skip
        try:
            for text in ("Where is my parcel?", "Hello", "Good morning"):
                status, answer = post(f"{url}/v1/chat/completions", chat(text))
                assert status == 200, answer
            # Read in a process of its own, and longer than the model takes.
            status, answer = post(f"{url}/v1/chat/completions", chat("word " * 5000))
            assert status == 400, answer
            assert gateway.poll() is None
            gateway.terminate()
            assert gateway.wait(WAIT_S) in (0, -signal.SIGTERM)
        finally:
            gateway.kill()
            gateway.wait()


@pytest.mark.servers
def test_triton_and_what_serves_its_ports_start_and_go_on(package: Path, tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.symlink_to(FULL)
    with TritonServer.of_package(package, ports=Ports.free(), log_file=log) as server:
        first = front_pid(server)
        assert is_ready(server.grpc_url, timeout_s=WAIT_S)
        log.unlink()
        log.mkdir()
        os.kill(first, signal.SIGKILL)
        wait_for(
            lambda: server.keep_ports_open() and front_pid(server) not in (0, first), "another front", WAIT_S
        )
        wait_for(lambda: is_ready(server.grpc_url, timeout_s=2), "its port", WAIT_S)


def test_a_guard_says_by_its_exit_code_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "stage").mkdir()
    guarded = process_guard.GuardedProcess(1, str(tmp_path / "stage"), "pipeline-no-such-mark")
    words = [sys.executable, "-I", process_guard.__file__, json.dumps(asdict(guarded)), "/no/such/program"]
    with FULL.open("wb") as full:
        done = subprocess.run(words, stdin=subprocess.PIPE, stdout=full, stderr=full, check=False)
    assert done.returncode == 127
    assert not (tmp_path / "stage").exists()


def start_and_ask(log_file: Path) -> None:
    with bound_sockets("127.0.0.1", 0) as sockets:
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}/healthz"
        command = (sys.executable, "-c", CHATTY_GATEWAY, str(sockets[0].fileno()))
        gateway = GatewayProcess(GatewayLaunch(command, Settings(), sockets, url), log_file)
        try:
            gateway.start(threading.Event())
            for _ in range(5):
                with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                    assert answer.status == 200
                assert gateway.check() is None
        finally:
            gateway.stop(at_once=True)


def test_a_gateway_is_started_where_its_log_takes_nothing_or_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "gateway.log").symlink_to(FULL)
    start_and_ask(tmp_path / "gateway.log")
    (tmp_path / "logs").write_text("no folder")
    start_and_ask(tmp_path / "logs" / "gateway.log")


def test_a_gateway_is_started_on_a_full_disk(full_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (full_disk / "other").write_bytes(b"." * 65536)
    start_and_ask(full_disk / "logs" / "gateway.log")


def test_a_log_is_written_again_as_soon_as_there_is_room(full_disk: Path) -> None:
    """Until then what cannot be moved stays, and whoever is started writes to /dev/null."""
    log = full_disk / "logs" / "triton.log"
    rotate(log)
    with open_log(log) as opened:
        assert opened.name == os.devnull
        opened.write(b"lost")
    for path in full_disk.glob("fill*"):
        path.unlink()
    with open_log(log) as opened:
        opened.write(b"kept")
    assert log.read_bytes() == b"kept"
    rotate(log)
    assert (full_disk / "logs" / "triton.log.1").read_bytes() == b"kept"


class Served:
    """`pipeline serve` as a process, whose output nobody can write, and whose logs lie on a small disk."""

    def __init__(self, package: Path, store: Path, *words: str) -> None:
        self.running = store / "running"
        command = [
            *(sys.executable, "-m", "pipeline.cli.main", "serve", "--package", str(package)),
            *("--store", str(store), "--port", "0", *words),
        ]
        with FULL.open("wb") as full:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=full, stderr=full)
        wait_for(lambda: self.process.poll() is not None or self.state == "ready", "readiness", WAIT_S)
        assert self.process.poll() is None

    @property
    def record(self) -> RunningServer | None:
        return RunningServer.read(self.running, "support")

    @property
    def state(self) -> str:
        return "" if self.record is None else self.record.state

    def pids(self, component: str) -> list[int]:
        assert self.record is not None
        assert self.record.control is not None
        status = ask(self.record.control, "status", timeout_s=WAIT_S)
        pids: list[int] = status["deployments"]["support"]["pids"][component]
        return pids

    def chat(self) -> int:
        assert self.record is not None
        return post(f"{self.record.gateway_url}/v1/chat/completions", chat("Hello"))[0]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)


@pytest.mark.servers
def test_a_gateway_that_is_killed_while_the_disk_is_full_is_there_again(package: Path, disk: Path) -> None:
    """The store is on it, with its logs and records."""
    served = Served(package, disk)
    try:
        assert served.chat() == 200
        fill(disk)
        (gateway,), triton = served.pids("gateway"), served.pids("triton")
        os.kill(gateway, signal.SIGKILL)
        wait_for(lambda: served.pids("gateway") not in ([], [gateway]), "another gateway", WAIT_S)
        assert served.chat() == 200
        assert served.pids("triton") == triton
        # It cannot be rewritten, but it is there.
        assert served.state == "ready"
        for path in disk.glob("fill*"):
            path.unlink()
        wait_for(
            lambda: served.record is not None and served.record.restarts == {"gateway": 1},
            "a new record",
            WAIT_S,
        )
        fill(disk)
    finally:
        served.stop()
    assert served.process.returncode == 0
    assert served.record is None


@pytest.mark.servers
def test_a_gateway_that_fails_too_often_leaves_triton_and_the_record_and_comes_back(
    package: Path, tmp_path: Path
) -> None:
    served = Served(package, tmp_path / "store", "--set", "triton.max_restarts=0")
    try:
        (gateway,), triton = served.pids("gateway"), served.pids("triton")
        os.kill(gateway, signal.SIGKILL)
        wait_for(lambda: served.state == "unready", "notice", WAIT_S)
        record = served.record
        assert record is not None
        assert record.components == {"triton": "ready", "gateway": "failing"}
        assert record.reason.startswith("the gateway was killed by SIGKILL; it failed 1 times within 300 s")
        assert served.pids("triton") == triton
        assert is_ready(record.target, timeout_s=WAIT_S)
        wait_for(lambda: served.state == "ready", "readiness", WAIT_S)
        assert served.chat() == 200
        assert served.pids("triton") == triton
    finally:
        served.stop()


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
