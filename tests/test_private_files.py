"""What holds questions, answers or keys can be read by its owner alone, from its first moment."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cache.sqlite import SqliteBackend
from pipeline.cli.cache import command
from pipeline.private_files import make_private
from tests.support.cache_asking import entry, question


@pytest.fixture(autouse=True)
def _open_to_all() -> Iterator[None]:
    """The umask that hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "cache.db")
    backend.put(question("Why?", tenant="shop"), entry("So."))
    yield backend
    backend.close()


@pytest.mark.usefixtures("cache")
def test_the_database_and_the_files_beside_it(tmp_path: Path) -> None:
    beside = sorted(tmp_path.iterdir())
    assert [path.name for path in beside] == ["cache.db", "cache.db-shm", "cache.db-wal"]
    assert [oct(mode(path)) for path in beside] == ["0o600"] * 3


def test_the_database_is_private_before_sqlite_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    connect = sqlite3.connect

    def seen(path: Path, **options: Any) -> sqlite3.Connection:
        found.append(oct(mode(path)))
        return connect(path, **options)

    monkeypatch.setattr(sqlite3, "connect", seen)
    SqliteBackend(tmp_path / "cache.db").close()
    assert set(found) == {"0o600"}


@pytest.mark.usefixtures("cache")
def test_a_database_of_an_earlier_version_is_tightened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path / "cache.db"
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    SqliteBackend(database).close()
    assert {oct(mode(path)) for path in tmp_path.iterdir()} == {"0o600"}
    assert f"{database} could be read by others (mode 0644): it is now 0600" in caplog.text


@pytest.mark.usefixtures("cache")
def test_what_is_exported_tells_the_tenant(tmp_path: Path) -> None:
    into = tmp_path / "answers.jsonl"
    result = CliRunner().invoke(command, ["export", str(tmp_path / "cache.db"), "--output", str(into)])
    assert result.exit_code == 0, result.output
    assert oct(mode(into)) == "0o600"
    assert json.loads(into.read_text())["tenant"] == question("Why?", tenant="shop").tenant.hex()


def test_a_file_that_a_user_named_keeps_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "triton.log"
    log.write_text("before")
    log.chmod(0o640)
    make_private(log, own=False)
    assert (oct(mode(log)), log.read_text()) == ("0o640", "before")
    assert f"{log}: others may read it (mode 0640): run chmod 600 {log}" in caplog.text
    make_private(Path("/dev/null"), own=True)
    assert mode(Path("/dev/null")) == 0o666
