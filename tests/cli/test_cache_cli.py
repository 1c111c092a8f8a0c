"""`pipeline cache`, on a cache that a deployment filled."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, make_question
from pipeline.cache.sqlite import SqliteBackend
from pipeline.cli.cache import command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cache.db"
    backend = SqliteBackend(path)
    for index, (question, answer) in enumerate(
        [
            ("Where is it?", "On its way."),
            ("Who are you?", "Write to ada@example.org"),
            ("Why?", "Because\nso."),
        ]
    ):
        created = time.time() - 3600 * (2 - index)
        entry = CacheEntry.of(
            [StoredChunk(answer, (1, 2))], finish_reason="stop", created=created, expires=created + 86400
        )
        backend.put(make_question(Origin("d"), question, {"temperature": 0}), entry)
    backend.close()
    return path


def run(file: Path, *arguments: str, input: str = "") -> Result:
    verb, *rest = arguments
    setting = f"cache.backend={{kind: sqlite, path: {file}}}"
    return CliRunner().invoke(command, [verb, "tiny-cpu", "--set", setting, *rest], input=input)


def test_stats(file: Path) -> None:
    shown = json.loads(run(file, "stats", "--json").output)
    assert (shown["entries"], shown["with_vectors"], shown["kind"]) == (3, 0, "sqlite")
    assert "3 answers" in run(file, "stats").output


def test_show(file: Path) -> None:
    rows = json.loads(run(file, "show", "--json", "--limit", "2").output)
    assert [row["question"] for row in rows] == ["Why?", "Who are you?"]
    whole = run(file, "show", rows[0]["key"][:10]).output
    assert "Because\nso." in whole
    assert run(file, "show", "zzzz").exit_code == 1


def test_audit_finds_what_may_not_be_kept(file: Path) -> None:
    result = run(file, "audit", "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert found["checked"] == 3
    assert [row["holds"] for row in found["held"]] == ["e-mail"]
    key = found["held"][0]["key"]
    assert "1 removed" in run(file, "purge", "--only", f"key={key[:12]}", "--yes").output
    assert run(file, "audit").exit_code == 0


def test_purge_by_age_and_all(file: Path) -> None:
    assert run(file, "purge", "--only", "older_than=soon", "--yes").exit_code == 2
    assert "1 removed" in run(file, "purge", "--only", "older_than=90m", "--yes").output
    assert run(file, "purge", input="n\n").exit_code == 1
    assert "2 removed" in run(file, "purge", input="y\n").output


def test_export(file: Path) -> None:
    rows = [json.loads(line) for line in run(file, "export").output.splitlines()]
    assert {row["question"]: row["answer"] for row in rows}["Why?"] == "Because\nso."


def test_a_cache_that_is_not_there(tmp_path: Path) -> None:
    result = run(tmp_path / "none.db", "stats")
    assert "no response cache here yet" in str(result.exception)
    assert not (tmp_path / "none.db").exists()
