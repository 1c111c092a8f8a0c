"""Answers in one SQLite file of this machine, or in the memory of one process.

Near questions are found by an index in memory, which follows the file.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path

from pipeline.cache.backend import (
    ALL_ENTRIES,
    ANY,
    BackendDown,
    Candidate,
    Capacity,
    EntryFilter,
    StoredEntry,
    Usage,
    Vector,
)
from pipeline.cache.encryption import Codec
from pipeline.cache.packed_backend import PackedBackend, PackedEntry, sql_where
from pipeline.cache.vector_index import Row, ScopeIndexes
from pipeline.sqlite_file import open_database

# PRAGMA user_version; a file with another one is refused.
VERSION = 2

_TABLES = (files(__package__) / "data" / "sqlite.sql").read_text(encoding="utf-8")

# Access times that are written together.
_TOUCHES = 256
# When the cache is full, a 64th of it is freed at once.
_SPARE = 64
_EVICT_AT_ONCE = 512


class SqliteBackend(PackedBackend):
    """See `pipeline.cache.backend.Backend`.

    >>> SqliteBackend(None, Capacity(entries=100)).usage().entries
    0
    """

    remote = False

    def __init__(
        self,
        path: Path | None,
        capacity: Capacity | None = None,
        *,
        codec: Codec | None = None,
    ) -> None:
        """
        Args:
            path: file, which is made if need be; None: entries are in memory, and live as long as this object.
            codec: encrypts entries; None: they are kept in the clear.

        Raises:
            BackendDown: the file cannot be used; the text says why.
        """
        super().__init__(capacity, codec, flush_every=_TOUCHES)
        self._path = path
        self._place = "memory" if path is None else str(path)
        self._writing = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        self._writer = self._connect()
        self._readers = threading.local()
        # For the indexes only: its data_version tells whether anything changed since they last read.
        self._followed = self._writer if path is None else self._connect()
        self._indexes = ScopeIndexes(self._codec, self._read_after, self._changes)
        self._closed = False

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """See `Backend.near`. An index in memory finds them."""
        with self._reading():
            return self._indexes.near(scope, vector, count, min_similarity, self._turns)

    def remove(self, keys: Iterable[bytes]) -> int:
        with self._transaction() as writer:
            return sum(writer.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount for key in keys)

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        condition, values = sql_where(which, "?")
        with self._transaction() as writer:
            return writer.execute(f"DELETE FROM entries WHERE {condition}", values).rowcount

    def items(self) -> Iterator[StoredEntry]:
        below = None
        while True:
            with self._reading():
                rows = (
                    self._reader()
                    .execute(
                        "SELECT id, key, scope, engine, tenant, turn, answer, used, vector IS NOT NULL"
                        " FROM entries WHERE ? IS NULL OR id < ? ORDER BY id DESC LIMIT 256",
                        (below, below),
                    )
                    .fetchall()
                )
            if not rows:
                return
            for _, key, scope, engine, tenant, turn, answer, used, has_vector in rows:
                opened = self._codec.both(turn, answer, key)
                if opened is not None:
                    yield StoredEntry(key, scope, engine, tenant, *opened, used, bool(has_vector))
            below = rows[-1][0]

    def removals(self) -> int:
        with self._reading():
            return int(self._reader().execute("SELECT removals FROM totals").fetchone()[0])

    def usage(self) -> Usage:
        with self._reading():
            reader = self._reader()
            entries, size, vectors = reader.execute("SELECT entries, bytes, vectors FROM totals").fetchone()
            oldest = reader.execute("SELECT min(created) FROM entries").fetchone()[0]
        return Usage(entries, size, vectors, oldest)

    def describe(self) -> Mapping[str, str]:
        if self._path is None:
            return {"kind": "memory"}
        return {
            "kind": "sqlite",
            "path": self._place,
            "schema": str(VERSION),
            "sqlite": sqlite3.sqlite_version,
        }

    def close(self) -> None:
        """Write when entries were last used, if that is possible, and close the file.

        A second call does nothing.
        """
        if self._closed:
            return
        with suppress(BackendDown):
            self._flush()
        self._closed = True
        for connection in self._opened:
            connection.close()

    def _answer(self, key: bytes) -> bytes | None:
        with self._reading():
            row = self._reader().execute("SELECT answer FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        del vector
        row = (
            packed.key, packed.scope, packed.engine, packed.tenant, packed.turn, packed.answer, packed.vector,
            packed.created, packed.expires, packed.created, packed.size,
        )  # fmt: skip
        with self._transaction() as writer:
            writer.execute("DELETE FROM entries WHERE key = ?", (packed.key,))
            writer.execute(
                "INSERT INTO entries (key, scope, engine, tenant, turn, answer, vector, created, expires, used, bytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            self._make_room(writer, packed.created)

    def _flush(self) -> None:
        with self._transaction():
            # It writes the access times.
            pass

    def _changes(self) -> int:
        if self._path is None:
            # The only connection: data_version counts the changes of others.
            return self._writer.total_changes
        return int(self._followed.execute("PRAGMA data_version").fetchone()[0])

    def _read_after(self, scope: bytes, after: int, limit: int) -> Sequence[Row]:
        return self._followed.execute(
            "SELECT id, key, vector FROM entries"
            " WHERE scope = ? AND id > ? AND vector IS NOT NULL ORDER BY id LIMIT ?",
            (scope, after, limit),
        ).fetchall()

    def _turns(self, ids: Sequence[int]) -> list[tuple[bytes, bytes] | None]:
        reader = self._reader()
        return [reader.execute("SELECT key, turn FROM entries WHERE id = ?", (id,)).fetchone() for id in ids]

    def _reader(self) -> sqlite3.Connection:
        if self._path is None:
            return self._writer
        reader: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if reader is None:
            reader = self._readers.connection = self._connect()
        return reader

    def _connect(self) -> sqlite3.Connection:
        if self._path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.executescript(_TABLES)
        else:
            connection = _connect(self._path)
        self._opened.append(connection)
        return connection

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise BackendDown(f"{self._place}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Make changes that come together, with the access times that were noted since the last ones."""
        with self._writing:
            touched = self._access_times.take()
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
                raise BackendDown(f"{self._place}: {error}") from error

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


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = open_database(path, "a cache", _TABLES, VERSION, power_safe=True)
        # 2 MiB for each connection, of which every reading thread has one: the file is mapped besides.
        connection.execute("PRAGMA cache_size = -2048")
        connection.execute("PRAGMA mmap_size = 268435456")
    except (sqlite3.Error, OSError) as error:
        raise BackendDown(f"{path}: {error}") from error
    return connection
