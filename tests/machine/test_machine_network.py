"""Ports and who holds them, and the hub as far as it can be reached."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from pipeline.machine.network import Hub, Listener, listeners, read_hub

SECRET = "hf_verysecret"


def test_a_port_and_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = listeners([port])
        assert found[port].pid == os.getpid()
        assert found[port].program == Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert listeners([port]) == {}


def test_recorded_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heading = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    )
    row = "   0: {address} {other} {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 0 100 0 0 10 0\n"
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(
        heading
        + row.format(address="0100007F:1F40", other="00000000:0000", state="0A", inode=4001)  # 8000 listens
        + row.format(
            address="0100007F:1F41", other="0100007F:9C40", state="01", inode=4002
        )  # 8001: a connection
    )
    any6 = "00000000000000000000000000000000"
    (net / "tcp6").write_text(
        heading + row.format(address=f"{any6}:1F42", other=f"{any6}:0000", state="0A", inode=4003)
    )
    process = tmp_path / "proc/77"
    (process / "fd").mkdir(parents=True)
    (process / "fd/3").symlink_to("socket:[4003]")
    (process / "fd/4").symlink_to("/dev/null")
    (process / "stat").write_text(f"77 (tritonserver) {' '.join(['0'] * 50)}\n")
    (process / "cmdline").write_text("tritonserver")
    (tmp_path / "proc/stat").write_text("btime 1700000000\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    assert listeners([8000, 8001, 8002, 8080]) == {
        8000: Listener(8000, None, None),
        8002: Listener(8002, 77, "tritonserver"),
    }


def test_a_kernel_without_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert listeners([8000]) == {}


class _Hub(BaseHTTPRequestHandler):
    """Knows one open repository and one gated; writes down what it was asked."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_HEAD(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        allowed = self.headers.get("Authorization") == f"Bearer {SECRET}"
        status = 302 if "open" in self.path else 200 if allowed else 401
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    _Hub.asked = []
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_hub_answers_for_each_repository(hub: str, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": f"{hub}/", "HF_HOME": str(tmp_path)}
    found = read_hub(
        [("a/open", None, "config.json"), ("b/gated", "refs/pr/1", "adapter_config.json")], 20, environment
    )
    assert found.repositories == {"a/open": 302, "b/gated": 401}
    assert found.reached
    assert abs(found.clock_ahead_s or 0) < 30
    assert sorted(path for path, _ in _Hub.asked) == [
        "/a/open/resolve/main/config.json",
        "/b/gated/resolve/refs%2Fpr%2F1/adapter_config.json",
    ]


@pytest.mark.parametrize("where", ["HF_TOKEN", "token", "HF_TOKEN_PATH"])
def test_a_token_is_sent_and_never_shown(hub: str, tmp_path: Path, where: str) -> None:
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    if where == "HF_TOKEN":
        environment[where] = SECRET
    else:
        file = tmp_path / ("token" if where == "token" else "elsewhere")
        file.write_text(f"{SECRET}\n")
        environment |= {} if where == "token" else {"HF_TOKEN_PATH": str(file)}
    found = read_hub([("b/gated", None, "config.json")], 20, environment)
    assert found.repositories == {"b/gated": 200}
    assert found.token is not None
    assert SECRET not in repr(found)


def test_offline_asks_nobody(hub: str, tmp_path: Path) -> None:
    found = read_hub(
        [("a/open", None, "config.json")],
        5,
        {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert found == Hub(hub, True, None)
    assert not found.reached
    assert _Hub.asked == []


def test_nobody_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = read_hub([], 20, {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)})
    assert "cannot be reached" in found.problem
    assert "refused" in found.problem


def test_a_hub_that_hangs_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        found = read_hub(
            [("a/b", None, "config.json")], 0.3, {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        )
    assert "cannot be reached" in found.problem


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://mirror", "file:///etc/passwd"])
def test_an_endpoint_that_is_no_address(endpoint: str, tmp_path: Path) -> None:
    assert (
        "no http or https address"
        in read_hub([], 5, {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}).problem
    )
