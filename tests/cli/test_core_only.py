"""Without extras each command works, or names every extra that it lacks before it has written or started anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.core_only import Environment

TRACED = ("--set", "gateway.traces=http://localhost:4318")
ENCRYPTED = ("--set", "cache={enabled: true, encryption: {key_env: SECRET}}")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core") / "site")


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (("build", "llama-3.1-8b-fp8", "--until", "evaluate"), "hub,calibrate"),
        (("gateway", "tiny-cpu", *ENCRYPTED, *TRACED), "gateway,traces,cache"),
        (("cache", "stats", "postgresql://nobody@127.0.0.1:1/none"), "pgvector"),
    ],
)
def test_what_is_missing_is_said_at_once(
    words: tuple[str, ...], extras: str, core: Environment, tmp_path: Path
) -> None:
    done = core.pipeline(*words, store=tmp_path / "store")
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].endswith(f"[{extras}]'")
    left = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name != "hashes.json"]
    assert left == [], "nothing was made"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "llama-3.1-8b-fp8"), "calibrate.target"),
        (("migrate", "llama-3.1-8b-fp8", "--dry-run"), "capacity_scheduler_policy"),
        (("doctor", "tiny-cpu"), "is missing"),
    ],
)
def test_what_needs_no_extra(words: tuple[str, ...], said: str, core: Environment, tmp_path: Path) -> None:
    done = core.pipeline(*words, store=tmp_path / "store")
    assert "Traceback" not in done.stderr
    assert said in done.stdout + done.stderr
