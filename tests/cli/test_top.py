"""`pipeline top` before records and pages of deployments; the pages are served as `prometheus_client` serves them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from pipeline.cli.top import command
from pipeline.errors import UserError
from pipeline.store import Store
from pipeline.triton.running import RunningServer


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """`with-gateway` is ready; `alone` has no gateway, and is being restarted; the supervisor of `dead` is gone."""
    triton, gateway = CollectorRegistry(), CollectorRegistry()
    blocks = Gauge(
        "nv_trt_llm_kv_cache_block_metrics", "Blocks.", ["model", "kv_cache_block_type"], registry=triton
    )
    for kind, count in {"used": 30, "max": 40}.items():
        blocks.labels("tensorrt_llm", kind).set(count)
    Gauge("pipeline_requests_running", "Running.", ["model"], registry=gateway).labels("with-gateway").set(7)
    Counter("pipeline_requests", "Requests.", ["model"], registry=gateway).labels("with-gateway").inc(1234)
    with ExitStack() as stack:
        pages = stack.enter_context(served(triton))
        record = RunningServer(
            pid=os.getpid(),
            grpc_url="127.0.0.1:1",
            http_url="http://127.0.0.1:2",
            metrics_url=f"{pages}/metrics",
            deployment=tmp_path / "deployment.json",
            started=datetime.now(UTC).isoformat(),
        )
        folder = Store.at(tmp_path).running
        url = stack.enter_context(served(gateway))
        replace(record, gateway_url=url).write(folder, "with-gateway")
        waits = replace(record, state="restarting", reason="Triton has died", restarts={"triton": 2})
        waits.write(folder, "alone")
        # No process began before the machine.
        replace(record, started="1970-01-01T00:00:00+00:00").write(folder, "dead")
        yield tmp_path


def top(store: Path, *words: str) -> Result:
    return CliRunner().invoke(command, ["--store", str(store), "--interval", "0.1", *words])


def test_without_a_terminal_it_is_one_table(store: Path) -> None:
    done = top(store)
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert rows["with-gateway"][1] == "ready"
    assert {"7/-/-", "75%", "1,234"} <= set(rows["with-gateway"])
    assert rows["alone"][1] == "restarting"
    assert rows["dead"][1] == "lost"
    assert "alone: Triton has died" in done.stdout


def test_for_scripts(store: Path) -> None:
    (shown,) = json.loads(top(store, "alone", "--once", "--json").stdout)
    assert (shown["name"], shown["state"], shown["restarts"]) == ("alone", "restarting", {"triton": 2})
    figures = shown["figures"]
    assert (figures["kv_used"], figures["ttft_p95_ms"], figures["requests"]) == (0.75, None, None)
    assert shown["memory_bytes"] > 0
    error = top(store, "alone", "nobody", "--json").exception
    assert isinstance(error, UserError)
    assert "nobody: not running here" in str(error)


def test_on_a_terminal_q_ends_it(store: Path) -> None:
    terminal, inside = pty.openpty()
    line = [sys.executable, "-m", "pipeline.cli.main", "top", "--store", str(store)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen(line, stdin=inside, stdout=inside, stderr=inside, env=environment)
    os.close(inside)
    try:
        shown = bytearray()
        while b"q ends" not in shown:
            shown += os.read(terminal, 65536)
        assert b"with-gateway" in shown
        os.write(terminal, b"xq")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
