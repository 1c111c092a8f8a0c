"""Records of running servers: found by name, and not believed when their process is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.errors import ServerError
from pipeline.triton.running import SUPERVISED, RunningServer, metrics_targets

SERVER = {
    "grpc_url": "127.0.0.1:8001",
    "grpc_socket": "unix:/tmp/pipeline-0/grpc:1",
    "http_url": "http://127.0.0.1:8000",
    "metrics_url": "http://127.0.0.1:8002/metrics",
}


def test_written_read_removed(tmp_path: Path) -> None:
    folder = tmp_path / "running"
    assert RunningServer.read(folder, "tiny") is None
    record = RunningServer.of(SERVER, tmp_path / "package")
    record.write(folder, "tiny")
    assert RunningServer.find(folder, "tiny") == record
    assert sorted(path.name for path in folder.iterdir()) == ["targets", "tiny.json"]
    assert json.loads((folder / "tiny.json").read_text()) == {
        "pid": os.getpid(),
        "grpc_url": "127.0.0.1:8001",
        "grpc_socket": "unix:/tmp/pipeline-0/grpc:1",
        "http_url": "http://127.0.0.1:8000",
        "metrics_url": "http://127.0.0.1:8002/metrics",
        "deployment": str(tmp_path / "package" / "deployment.json"),
        "started": record.started,
        "state": "ready",
        "reason": "",
        "components": {},
        "restarts": {},
        "gateway_url": "",
        "log": None,
        "gateway_log": None,
        "control": None,
        "recipe": [],
        "previous": None,
        "settings": None,
        "boot_id": record.boot_id,
        "uptime_s": record.uptime_s,
        "mark": record.mark,
    }
    record.remove(folder, "tiny")
    record.remove(folder, "tiny")
    assert RunningServer.find(folder, "tiny") is None


def test_prometheus_is_told_where_metrics_are_also_when_that_changes(tmp_path: Path) -> None:
    """A list of targets, as `file_sd_configs` reads them; it stays when the deployment ends."""
    record = RunningServer.of(SERVER, tmp_path)
    record.write(tmp_path, "tiny")
    file = metrics_targets(tmp_path, "tiny")
    assert json.loads(file.read_text()) == [{"targets": ["127.0.0.1:8002"], "labels": {"deployment": "tiny"}}]
    before = file.stat().st_ino
    replace(record, state="unready").write(tmp_path, "tiny")
    assert file.stat().st_ino == before, "Prometheus reads it again only where it says something else"
    moved = replace(record, metrics_url="http://127.0.0.1:9002/metrics")
    moved.write(tmp_path, "tiny")
    moved.remove(tmp_path, "tiny")
    assert json.loads(file.read_text())[0]["targets"] == ["127.0.0.1:9002"]
    assert [path.name for path in file.parent.iterdir()] == ["tiny.json"]
    assert RunningServer.all(tmp_path) == {}


def test_all_fields_come_back(tmp_path: Path) -> None:
    record = RunningServer.of(
        SERVER,
        tmp_path,
        state="restarting",
        reason="process 7 is gone",
        components={"triton": "restarting", "gateway": "ready"},
        restarts={"triton": 2},
        log=tmp_path / "triton.log",
        control=tmp_path / "tiny.sock",
        recipe=("tiny", "--store", "/s"),
        previous=tmp_path / "before",
    )
    record.write(tmp_path, "tiny")
    assert RunningServer.all(tmp_path) == {"tiny": record}
    assert RunningServer.find(tmp_path, "tiny") is None
    assert RunningServer.find(tmp_path, "tiny", states=SUPERVISED) == record


def test_a_record_of_an_older_version_is_that_of_a_ready_server(tmp_path: Path) -> None:
    record = RunningServer.of(SERVER, tmp_path)
    older = {
        key: record.as_json()[key]
        for key in ("pid", "grpc_url", "http_url", "metrics_url", "deployment", "started")
    }
    (tmp_path / "tiny.json").write_text(json.dumps({**older, "of_a_newer_version": 1}))
    assert RunningServer.find(tmp_path, "tiny") == replace(
        record, boot_id="", uptime_s=0.0, grpc_socket="", mark=""
    )


def test_the_record_of_another_server_is_left_alone(tmp_path: Path) -> None:
    first = RunningServer.of(SERVER, tmp_path)
    second = replace(first, grpc_url="127.0.0.1:9001")
    second.write(tmp_path, "tiny")
    first.remove(tmp_path, "tiny")
    assert RunningServer.read(tmp_path, "tiny") == second


def test_a_killed_process_is_not_alive(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = replace(RunningServer.of(SERVER, tmp_path), pid=process.pid)
        record.write(tmp_path, "tiny")
        assert record.alive
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not record.alive  # not buried yet
    assert not record.alive
    assert RunningServer.read(tmp_path, "tiny") == record
    assert RunningServer.find(tmp_path, "tiny") is None


def test_a_number_that_was_given_again_is_not_believed(tmp_path: Path) -> None:
    record = RunningServer.of(SERVER, tmp_path)
    assert not replace(record, uptime_s=1.0).alive
    assert not replace(record, boot_id="that of another start").alive
    earlier = datetime.now(UTC) - timedelta(days=400)
    assert not replace(record, boot_id="", started=earlier.isoformat()).alive


@pytest.mark.parametrize("days", [-400, 400])
def test_a_clock_that_is_set_ends_no_server(tmp_path: Path, days: int) -> None:
    """As on a machine that starts before it knows the time."""
    told = datetime.now(UTC) + timedelta(days=days)
    assert replace(RunningServer.of(SERVER, tmp_path), started=told.isoformat()).alive


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', '{"deployment": 5}'])
def test_a_damaged_record_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "tiny.json").write_text(text)
    with pytest.raises(ServerError, match=r"tiny\.json: is not a record"):
        RunningServer.read(tmp_path, "tiny")
