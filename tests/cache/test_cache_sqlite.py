"""Properties of the backend in a file alone: other versions, foreign files, readers beside a writer."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pipeline.cache.backend import BackendDown
from pipeline.cache.encryption import AesGcmCodec
from pipeline.cache.sqlite import SqliteBackend
from tests.support.cache_asking import NOW, entry, question


def test_the_cache_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    SqliteBackend(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(BackendDown, match="version 99, this is 2"):
        SqliteBackend(path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(BackendDown, match="not a database"):
        SqliteBackend(path)
    assert path.read_bytes().startswith(b"no database")


def test_reading_while_another_process_writes_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    backend = SqliteBackend(path)
    backend.put(question("a"), entry("A"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert backend.get(question("a").key, NOW) is not None, "a read that waited would end as a miss"
    other.execute("ROLLBACK")
    other.close()
    backend.close()


@pytest.mark.parametrize(
    ("secret", "fault"), [("short", "base64|has 3 bytes"), ("YWJj", "has 3 bytes: it must have 32")]
)
def test_a_key_that_is_none(secret: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        AesGcmCodec(secret)
