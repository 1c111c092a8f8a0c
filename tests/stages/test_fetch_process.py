"""Fetching as a process: killed in the middle, two at once, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.store import Store, verify
from tests.support import fetching
from tests.support.hub import LoopbackHub, whole
from tests.support.waiting import wait_for

REPO = "org/name"
WEIGHTS = "model.safetensors"
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        yield running


@pytest.fixture
def start(hub: LoopbackHub, tmp_path: Path) -> Iterator[Start]:
    """Start a fetch of `REPO` from `hub` into the store `tmp_path/store`, with the hub's token."""
    started: list[subprocess.Popen[str]] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_DEBUG": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, fetching.__file__, str(tmp_path / "store"), REPO]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[Path, str]:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return Path(output.strip()), errors


def test_kill_9_and_the_rest_is_fetched(hub: LoopbackHub, start: Start, tmp_path: Path) -> None:
    files = whole(rows=20_000)
    hub.add(REPO, files)
    hub.faults.bytes_per_s = 2_000_000
    store = Store(tmp_path / "store")
    killed = start()

    def part() -> int:
        found = list(store.work.glob(f"*/.partial/{WEIGHTS}"))
        return found[0].stat().st_size if found else 0

    wait_for(lambda: part() > 400_000, "a part of the weights")
    killed.kill()
    killed.wait()
    kept = part()
    assert kept < len(files[WEIGHTS])
    hub.faults.bytes_per_s = 0
    hub.requests.clear()

    path, errors = finish(start())
    assert hub.ranges(WEIGHTS) == [f"bytes={kept}-"]
    assert "are here from an earlier try" in errors
    assert hub.fetched() == {WEIGHTS}
    assert {name: (path / name).read_bytes() for name in files} == files
    assert list(store.work.iterdir()) == []
    assert verify(store.get(path.name)).ok


def test_two_at_once_fetch_once(hub: LoopbackHub, start: Start, tmp_path: Path) -> None:
    hub.add(REPO, whole(rows=20_000))
    hub.faults.bytes_per_s = 2_000_000
    first, second = start(), start()
    paths = {finish(first)[0], finish(second)[0]}
    assert len(paths) == 1
    assert hub.ranges(WEIGHTS) == [""]
    assert list((tmp_path / "store" / "work").iterdir()) == []


@pytest.mark.parametrize("trouble", ["gated", "bad token", "wrong hash", "broken", "redirect"])
def test_the_token_appears_nowhere(hub: LoopbackHub, start: Start, tmp_path: Path, trouble: str) -> None:
    """Not in what is printed (log messages of all levels and a traceback included), and in no file of the store."""
    hub.add(REPO, whole(), gated=True)
    hub.faults.redirect = trouble == "redirect"
    if trouble == "gated":
        hub.members = ()
    elif trouble == "bad token":
        hub.token, hub.members = "hf_other", ()
    elif trouble == "wrong hash":
        hub.faults.content = {WEIGHTS: b"wrong" * 2000}
    elif trouble == "broken":
        hub.faults.break_once = {WEIGHTS: 100}
    process = start()
    output, errors = process.communicate(timeout=60)
    assert (process.returncode == 0) is (trouble in ("broken", "redirect")), errors
    assert "Traceback" in errors or process.returncode == 0
    assert any(request.authorization == "Bearer hf_secret" for request in hub.requests)
    assert all(
        request.path.startswith(("/api/models/org/name", "/org/name/", "/cdn/")) for request in hub.requests
    )
    assert "hf_secret" not in output + errors
    assert "X-Signature" not in "".join(line for line in errors.splitlines() if line.startswith("pipeline"))
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path
