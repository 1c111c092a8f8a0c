"""Without extras each command works, or names every extra that it lacks before it has written or started anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.core_only import Environment

TRACED = ("--set", "gateway.traces=http://localhost:4318")
ENCRYPTED = ("--set", "cache={enabled: true, encryption: {key_env: SECRET}}")


MISSING = {  # command -> the extras that it lacks
    ("build", "llama-3.1-8b-fp8", "--until", "evaluate"): "hub,calibrate",
    ("gateway", "tiny-cpu", *ENCRYPTED, *TRACED): "gateway,traces,cache",
    ("cache", "stats", "postgresql://nobody@127.0.0.1:1/none"): "pgvector",
}
WORKING = {  # command -> what it says
    ("plan", "llama-3.1-8b-fp8"): "calibrate.target",
    ("migrate", "llama-3.1-8b-fp8", "--dry-run"): "capacity_scheduler_policy",
    ("doctor", "tiny-cpu"): "is missing",
}
Words = tuple[str, ...]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("core") / "store"


@pytest.fixture(scope="module")
def done(store: Path) -> dict[Words, subprocess.CompletedProcess[str]]:
    """All commands, run by one process: to import what they have in common takes longer than they do."""
    core = Environment(store.parent / "site")
    commands = [*MISSING, *WORKING]
    return dict(zip(commands, core.pipelines(commands, store=store), strict=True))


@pytest.mark.parametrize("words", MISSING)
def test_what_is_missing_is_said_at_once(
    words: Words, done: dict[Words, subprocess.CompletedProcess[str]], store: Path
) -> None:
    ended = done[words]
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "pip install" in line]
    assert len(lines) == 1, ended.stderr
    assert lines[0].endswith(f"[{MISSING[words]}]'")
    left = [path for path in store.rglob("*") if path.is_file() and path.name != "hashes.json"]
    assert left == [], "nothing was made"


@pytest.mark.parametrize("words", WORKING)
def test_what_needs_no_extra(words: Words, done: dict[Words, subprocess.CompletedProcess[str]]) -> None:
    assert "Traceback" not in done[words].stderr
    assert WORKING[words] in done[words].stdout + done[words].stderr
