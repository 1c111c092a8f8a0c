"""The supervisor's socket: what is asked, what comes back, and who is not heard."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ServerError, UserError
from pipeline.serving import control
from pipeline.serving.control import ControlServer, ask


def add(request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    say("adding")
    if "a" not in request:
        raise UserError("what is to be added?")
    return {"sum": request["a"] + request["b"]}


def lines_of(path: Path, sent: bytes) -> list[dict[str, Any]]:
    """What a client gets that is not ours; in a folder with a short path."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(path))
        client.sendall(sent)
        with client.makefile() as answer:
            return [json.loads(line) for line in answer]


def test_who_sends_nothing_or_slowly_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_REQUEST_S", 0.3)
    with ControlServer(tmp_path / "r.sock", {"add": add}) as server, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(server.path))
        ended = threading.Event()

        def dribble() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    client.sendall(b" ")

        thread = threading.Thread(target=dribble)
        thread.start()
        with client.makefile() as answer:
            assert "did not come within" in json.loads(answer.readline())["error"]
        ended.set()
        thread.join()


def test_progress_results_and_errors(tmp_path: Path) -> None:
    told: list[str] = []
    with ControlServer(tmp_path / "r.sock", {"add": add}) as server:
        assert ask(server.path, "add", a=1, b=2, on_progress=told.append) == {"sum": 3}
        assert told == ["adding"]
        with pytest.raises(UserError, match="what is to be added"):
            ask(server.path, "add")
        with pytest.raises(UserError, match="cannot 'subtract'; it can: add"):
            ask(server.path, "subtract")
    with pytest.raises(ServerError, match="cannot be asked"):
        ask(server.path, "add", a=1, b=2)
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_may_connect_and_paths_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / ("longer" * 20)
    folder.mkdir(parents=True)
    before = os.umask(0)
    try:
        with ControlServer(folder / f"{'n' * 63}.sock", {"add": add}) as server:
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            assert ask(server.path, "add", a=1, b=2) == {"sum": 3}
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "sent",
    [
        b"\n", b"[]\n", b'"do"\n', b"{" + b" " * 70_000 + b"\n", b"\xff\n", b"[" * 60_000 + b"\n",
        b"x" * 200_000 + b"\n", b'{"do": {"a": [1]}}\n', b'{"do": "\\ud800"}\n', b'{"do": 1e999}\n',
    ],
    ids=lambda sent: sent[:12],
)  # fmt: skip
def test_nonsense_is_refused_and_others_go_on(tmp_path: Path, sent: bytes) -> None:
    """A traceback of the thread that answers would fail this test."""
    with ControlServer(tmp_path / "r.sock", {"add": add}) as server:
        (answer,) = lines_of(server.path, sent)
        assert answer["exit_code"] == 2
        assert ask(server.path, "add", a=1, b=2) == {"sum": 3}


def test_a_dead_server_leaves_a_socket_that_the_next_one_takes(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with pytest.raises(ServerError, match="cannot be asked: Connection refused"):
        ask(path, "add", a=1, b=2)
    with ControlServer(path, {"add": add}):
        assert ask(path, "add", a=1, b=2) == {"sum": 3}


def test_who_leaves_early_does_not_end_what_was_asked_for(tmp_path: Path) -> None:
    left, done = threading.Event(), threading.Event()

    def work(_: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
        say("begun")
        assert left.wait(30)
        say("nobody listens")
        say("nobody listens")
        done.set()
        return {}

    with ControlServer(tmp_path / "r.sock", {"work": work}) as server:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(server.path))
            client.sendall(b'{"do": "work"}\n')
            assert b"begun" in client.recv(100)
        left.set()
        assert done.wait(30)


def test_a_server_that_ends_meanwhile_is_told(tmp_path: Path) -> None:
    path, accepted = tmp_path / "r.sock", threading.Event()

    def end(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b'{"progress": "x"}\n{"resu')
        accepted.set()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        threading.Thread(target=end, args=(listening,), daemon=True).start()
        with pytest.raises(ServerError, match="ended before it was done"):
            ask(path, "stop")
        assert accepted.wait(30)
