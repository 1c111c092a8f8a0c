"""The embedded backend: many processes, kill -9, limits, expiry, a damaged or foreign file."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.backend import BackendDown, Capacity, EntryFilter
from pipeline.cache.encryption import AesGcmCodec
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.sqlite import SqliteBackend

ORIGIN = Origin("package")
NOW = 1_000_000.0


def question(text: str, tenant: str = "") -> Question:
    return make_question(Origin("package", tenant=tenant), text, {"temperature": 0})


def entry(text: str, ttl_s: float = 600, created: float = NOW) -> CacheEntry:
    return CacheEntry.of([StoredChunk(text)], finish_reason="stop", created=created, expires=created + ttl_s)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "cache.db")
    yield backend
    backend.close()


def test_what_was_put_is_found_by_its_key_alone(backend: SqliteBackend) -> None:
    backend.put(question("a"), entry("A"))
    found = backend.get(question("a").key, NOW)
    assert found is not None
    assert found.text == "A"
    assert backend.get(question("b").key, NOW) is None


def test_a_hit_does_not_prolong_a_life(backend: SqliteBackend) -> None:
    backend.put(question("a"), entry("A", ttl_s=3))
    assert backend.get(question("a").key, NOW + 2.9) is not None
    assert backend.get(question("a").key, NOW + 3) is None


def test_a_new_answer_replaces_the_old_one(backend: SqliteBackend) -> None:
    backend.put(question("a"), entry("old"))
    before = backend.removals()
    backend.put(question("a"), entry("new"))
    found = backend.get(question("a").key, NOW)
    assert found is not None
    assert found.text == "new"
    assert backend.usage().entries == 1
    assert backend.removals() > before


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path / "cache.db", Capacity(entries=64), power_safe=False)
    for n in range(64):
        backend.put(question(str(n)), entry("x", created=NOW + n))
    backend.get(question("0").key, NOW + 100)
    backend.put(question("one more"), entry("x", created=NOW + 101))
    assert backend.usage().entries <= 64
    assert backend.get(question("0").key, NOW + 102) is not None
    assert backend.get(question("1").key, NOW + 102) is None
    backend.close()


def test_bytes_are_limited_too(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path / "cache.db", Capacity(bytes=100_000), power_safe=False)
    for n in range(50):
        backend.put(question(str(n)), entry("x" * 5000, created=NOW + n))
    assert 50_000 < backend.usage().bytes <= 100_000
    backend.close()


def test_purge_by_scope_and_age(backend: SqliteBackend) -> None:
    for n in range(4):
        backend.put(question(str(n), tenant=str(n % 2)), entry("x", created=NOW + n))
    assert backend.purge(EntryFilter(scope=question("", tenant="0").scope, before=NOW + 1)) == 1
    assert backend.purge(EntryFilter(scope=question("", tenant="1").scope)) == 2
    assert [kept.turn for kept in backend.items()] == ["2"]
    assert backend.purge() == 1
    assert backend.usage().bytes == 0


def test_near_stays_in_the_scope(backend: SqliteBackend) -> None:
    vectors = np.eye(4, dtype=np.float32)
    for n in range(3):
        backend.put(question(str(n)), entry("x"), vectors[n])
    backend.put(question("other", tenant="t"), entry("x"), vectors[3])
    found = backend.near(question("").scope, (vectors[1] + 0.1 * vectors[3]) / np.float32(1.005), 2)
    assert found[0].turn == "1"
    assert found[0].similarity == pytest.approx(0.995, abs=1e-3)
    assert {candidate.turn for candidate in found} <= {"0", "1", "2"}


def test_near_sees_what_came_later_and_not_what_went(tmp_path: Path) -> None:
    one, other = SqliteBackend(tmp_path / "cache.db"), SqliteBackend(tmp_path / "cache.db")
    vectors = np.eye(4, dtype=np.float32)
    assert one.near(question("").scope, vectors[0], 1) == []
    other.put(question("a"), entry("x"), vectors[0])
    assert [candidate.turn for candidate in one.near(question("").scope, vectors[0], 1)] == ["a"]
    one.put(question("b"), entry("x"), vectors[0])
    assert {candidate.turn for candidate in other.near(question("").scope, vectors[0], 2)} == {"a", "b"}
    other.remove([question("a").key])
    assert [candidate.turn for candidate in one.near(question("").scope, vectors[0], 2)] == ["b"]
    one.close()
    other.close()


def test_near_from_many_threads_while_others_write(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path / "cache.db", power_safe=False)
    vectors = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    wrong: list[object] = []

    def work(part: int) -> None:
        for n in range(part, 200, 4):
            backend.put(question(str(n)), entry("x"), vectors[n])
            found = backend.near(question("").scope, vectors[n], 1)
            if not found or found[0].turn != str(n):
                wrong.append((n, found))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    backend.close()


WRITER = """
import sys
from pathlib import Path
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, make_question
from pipeline.cache.sqlite import SqliteBackend
backend = SqliteBackend(Path(sys.argv[1]))
for n in range(int(sys.argv[3])):
    text = f"{sys.argv[2]}-{n}"
    answer = CacheEntry.of([StoredChunk(text)], finish_reason="stop", created=1e6, expires=2e9)
    backend.put(make_question(Origin("package"), text, {"temperature": 0}), answer)
    print(text, flush=True)
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)], stdout=subprocess.PIPE, text=True
    )


def test_several_processes_write_at_once_and_all_see_everything(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    writers = [writer(path, name, 100) for name in "abcd"]
    for process in writers:
        process.communicate(timeout=60)
    assert [process.returncode for process in writers] == [0] * 4
    backend = SqliteBackend(path)
    assert all(backend.get(question(f"{name}-{n}").key, NOW) for name in "abcd" for n in range(100))
    backend.close()


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    process = writer(path, "k", 100_000)
    assert process.stdout is not None
    written = [process.stdout.readline().strip() for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    written += process.communicate(timeout=10)[0].split("\n")[:-2]  # the last line may be torn
    backend = SqliteBackend(path)
    assert all(backend.get(question(text).key, NOW) for text in written)
    assert backend._writer.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    entries = backend._writer.execute("SELECT count(*) FROM entries").fetchone()[0]
    assert backend.usage().entries == entries
    backend.close()


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


def test_sealed_nothing_can_be_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    secret = AesGcmCodec.new_secret()
    backend = SqliteBackend(path, codec=AesGcmCodec(secret))
    backend.put(question("a question"), entry("an answer"), np.ones(4, np.float32))
    assert [kept.turn for kept in backend.items()] == ["a question"]
    assert backend.near(question("").scope, np.ones(4, np.float32), 1)[0].turn == "a question"
    backend.close()
    assert not any(
        word in file.read_bytes() for file in tmp_path.iterdir() for word in (b"a question", b"an answer")
    )
    again = SqliteBackend(path, codec=AesGcmCodec(secret))
    found = again.get(question("a question").key, NOW)
    assert found is not None
    assert found.text == "an answer"
    again.close()


def test_another_key_opens_nothing_and_fails_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    backend = SqliteBackend(path, codec=AesGcmCodec(AesGcmCodec.new_secret()))
    backend.put(question("a"), entry("A"))
    backend.close()
    other = SqliteBackend(path, codec=AesGcmCodec(AesGcmCodec.new_secret()))
    assert other.get(question("a").key, NOW) is None
    assert list(other.items()) == []
    assert other.unreadable() > 0
    other.close()


@pytest.mark.parametrize(
    ("secret", "fault"), [("short", "base64|has 3 bytes"), ("YWJj", "has 3 bytes: it must have 32")]
)
def test_a_key_that_is_none(secret: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        AesGcmCodec(secret)
