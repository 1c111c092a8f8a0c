"""The whole pipeline, for real: packages built by the command line into a store of the test session."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_clients import http

Build = Callable[..., dict[str, Any]]


def pipeline(*arguments: str, store: Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "pipeline.cli.main", *arguments]
    environment = {**os.environ, "PIPELINE_STORE": str(store)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


@contextmanager
def started_gateway(recipe: str, store: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`pipeline gateway`, which waits for the recipe's server: its URL, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "pipeline.cli.main",
        "gateway",
        recipe,
        "--port",
        port,
        "--wait-s",
        "240",
    ]
    process = subprocess.Popen(command, env={**os.environ, "PIPELINE_STORE": str(store)})
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(10)


def answers(url: str) -> bool:
    """Whether a page is there, and says 200."""
    try:
        return http.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def launch(recipe: Path, store: Path, *, built: bool) -> dict[str, Any]:
    """How `serve --dry-run` says that a recipe is started; all that does not depend on estimates."""
    ports = ("--set", "triton={grpc_port: 7001, metrics_port: 7002, start_timeout_s: 300}")
    done = pipeline("serve", str(recipe), "--dry-run", "--json", *ports, store=store)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["built"] is built
    assert ("Before: pipeline build" in said["note"]) is not built
    shown = {key: said[key] for key in ("name", "command", "environment", "shm_mib", "start_deadline_s")}
    return {**shown, "docker": [word.replace(str(store), "STORE") for word in said["docker"]]}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a run: what one has built, the others find."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "store"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def build(store: Path) -> Build:
    """`build("tiny-cpu", "a.b=c")` -> what `pipeline build --json` printed when this process first asked for it."""

    @cache
    def build(recipe: str, *overrides: str) -> dict[str, Any]:
        sets = [argument for override in overrides for argument in ("--set", override)]
        done = pipeline("build", recipe, *sets, "--json", store=store)
        assert done.returncode == 0, done.stderr
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary

    return build
