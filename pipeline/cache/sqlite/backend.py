"""Entries in the file: exact lookup, storing, eviction, listing. What is near is asked of the index that follows it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.cache.backend import BackendDown, Candidate, Capacity, Fill, Kept, Vector
from pipeline.cache.entry import Entry
from pipeline.cache.key import Question
from pipeline.cache.sealing import Codec, Plain
from pipeline.cache.sqlite.follower import Follower
from pipeline.cache.sqlite.schema import VERSION, connect

_GET = "SELECT answer FROM entries WHERE key = ?"
_TOUCHES = 256  # uses that are written together
_SPARE = 64  # when full, a 64th is freed at once
_EVICT_AT_ONCE = 512


class SqliteBackend:
    """See `pipeline.cache.backend.Backend`.

    >>> cache = SqliteBackend(folder / "cache.db")     # doctest: +SKIP
    """

    remote = False

    def __init__(
        self,
        path: Path,
        capacity: Capacity | None = None,
        *,
        codec: Codec | None = None,
        power_safe: bool = True,
    ) -> None:
        """`power_safe`: an answer that was put outlives a power cut, not only the death of this process."""
        self.path = path
        self._capacity = capacity or Capacity()
        self._codec = codec or Plain()
        self._power_safe = power_safe
        self._writing = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        self._writer = self._connect()
        self._readers = threading.local()
        self._touched: dict[bytes, float] = {}
        self._follower = Follower(self._connect(), self._codec.open)
        self._closed = False

    def get(self, key: bytes, now: float) -> Entry | None:
        try:
            row = self._reader().execute(_GET, (key,)).fetchone()
        except sqlite3.Error as error:
            raise BackendDown(f"{self.path}: {error}") from error
        if row is None:
            return None
        entry = Entry.from_bytes(self._codec.open(row[0], key))
        if entry.expires <= now:
            return None
        self._touched[key] = now
        if len(self._touched) >= _TOUCHES:
            with self._transaction():
                pass  # which writes the uses
        return entry

    def put(self, question: Question, entry: Entry, vector: Vector | None = None) -> None:
        key, seal = question.key, self._codec.seal
        turn, answer = seal(question.turn.encode(), key), seal(entry.raw, key)
        packed = None if vector is None else seal(vector.astype("<f2").tobytes(), key)
        size = len(answer) + len(turn) + len(packed or b"")
        row = (
            key, question.scope, turn, answer, packed, entry.created, entry.expires, entry.created, size,
        )  # fmt: skip
        with self._transaction() as writer:
            writer.execute("DELETE FROM entries WHERE key = ?", (key,))
            writer.execute(
                "INSERT INTO entries (key, scope, turn, answer, vector, created, expires, used, bytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            self._make_room(writer, entry.created)

    def near(self, scope: bytes, vector: Vector, count: int) -> Sequence[Candidate]:
        try:
            reader = self._reader()
            found = self._follower.search(scope, vector, count)
            rows = {
                row[0]: row
                for id, _ in found
                if (row := reader.execute("SELECT id, key, turn FROM entries WHERE id = ?", (id,)).fetchone())
            }
        except sqlite3.Error as error:
            raise BackendDown(f"{self.path}: {error}") from error
        if gone := [id for id, _ in found if id not in rows]:
            self._follower.forget(scope, gone)
        return [
            Candidate(key, self._codec.open(turn, key).decode(), similarity)
            for id, similarity in found
            if id in rows
            for _, key, turn in [rows[id]]
        ]

    def remove(self, keys: Iterable[bytes]) -> int:
        with self._transaction() as writer:
            return sum(writer.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount for key in keys)

    def purge(self, *, scope: bytes | None = None, before: float | None = None) -> int:
        with self._transaction() as writer:
            return writer.execute(
                "DELETE FROM entries WHERE (?1 IS NULL OR scope = ?1) AND (?2 IS NULL OR created < ?2)",
                (scope, before),
            ).rowcount

    def items(self) -> Iterator[Kept]:
        below = None
        while True:
            rows = (
                self._reader()
                .execute(
                    "SELECT id, key, scope, turn, answer, used, vector IS NOT NULL FROM entries"
                    " WHERE ?1 IS NULL OR id < ?1 ORDER BY id DESC LIMIT 256",
                    (below,),
                )
                .fetchall()
            )
            if not rows:
                return
            for _, key, scope, turn, answer, used, has_vector in rows:
                opened = Entry.from_bytes(self._codec.open(answer, key))
                question = self._codec.open(turn, key).decode()
                yield Kept(key, scope, question, opened, used, bool(has_vector))
            below = rows[-1][0]

    def removals(self) -> int:
        try:
            return int(self._reader().execute("SELECT removals FROM totals").fetchone()[0])
        except sqlite3.Error as error:
            raise BackendDown(f"{self.path}: {error}") from error

    def fill(self) -> Fill:
        reader = self._reader()
        entries, size, vectors = reader.execute("SELECT entries, bytes, vectors FROM totals").fetchone()
        oldest = reader.execute("SELECT min(created) FROM entries").fetchone()[0]
        return Fill(entries, size, vectors, oldest)

    def describe(self) -> Mapping[str, str]:
        return {
            "kind": "sqlite",
            "path": str(self.path),
            "schema": str(VERSION),
            "sqlite": sqlite3.sqlite_version,
        }

    def close(self) -> None:
        if self._closed:
            return
        with self._transaction():
            pass
        self._closed = True
        for connection in self._opened:
            connection.close()

    def _reader(self) -> sqlite3.Connection:
        reader: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if reader is None:
            reader = self._readers.connection = self._connect()
        return reader

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path, power_safe=self._power_safe)
        self._opened.append(connection)
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Changes that come together, with the uses that were noted since the last ones."""
        with self._writing:
            touched, self._touched = self._touched, {}
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    if touched:
                        uses = [(now, key) for key, now in touched.items()]
                        self._writer.executemany("UPDATE entries SET used = ? WHERE key = ?", uses)
                    yield self._writer
                    self._writer.execute("COMMIT")
                except BaseException:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise BackendDown(f"{self.path}: {error}") from error

    def _make_room(self, writer: sqlite3.Connection, now: float) -> None:
        most = self._capacity
        if not self._over(writer, most.entries, most.bytes):
            return
        writer.execute("DELETE FROM entries WHERE expires <= ?", (now,))
        entries, size = most.entries - most.entries // _SPARE, most.bytes - most.bytes // _SPARE
        while self._over(writer, entries, size):
            gone = writer.execute(
                "DELETE FROM entries WHERE id IN (SELECT id FROM entries ORDER BY used LIMIT ?)",
                (min(_EVICT_AT_ONCE, max(1, most.entries // _SPARE)),),
            ).rowcount
            if not gone:
                return

    @staticmethod
    def _over(writer: sqlite3.Connection, entries: int, size: int) -> bool:
        have = writer.execute("SELECT entries, bytes FROM totals").fetchone()
        return bool(have[0] > entries or have[1] > size)
