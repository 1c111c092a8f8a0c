"""Entries in the file: exact lookup, storing, eviction, listing. What is near is asked of the index that follows it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from pipeline.cache.codec import PackedEntry
from pipeline.cache.encryption import Codec
from pipeline.cache.packed_backend import PackedBackend, sql_where
from pipeline.cache.sqlite.schema import VERSION, connect
from pipeline.cache.vector_index import Row, ScopeIndexes

_GET = "SELECT answer FROM entries WHERE key = ?"
_TOUCHES = 256  # uses that are written together
_SPARE = 64  # when full, a 64th is freed at once
_EVICT_AT_ONCE = 512


class SqliteBackend(PackedBackend):
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
        """
        Args:
            path: of the file, which is made if need be.
            capacity: how much is kept at most; None: the defaults of `Capacity`.
            codec: encrypts what is kept; None: nothing is encrypted.
            power_safe: an answer that was put outlives a power cut, not only the death of this process.

        Raises:
            BackendDown: the file cannot be used; the text says why.
        """
        super().__init__(capacity, codec, flush_every=_TOUCHES)
        self.path = path
        self._power_safe = power_safe
        self._writing = threading.Lock()
        self._opened: list[sqlite3.Connection] = []
        self._writer = self._connect()
        self._readers = threading.local()
        # used for the indexes only: its data_version tells whether anything changed since they last read
        self._followed = self._connect()
        self._indexes = ScopeIndexes(self._codec, self._read_after, self._changes)
        self._closed = False

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """Find the entries of a scope with the nearest questions, the nearest first.

        An index in memory finds them.

        Args:
            scope: where to search.
            vector: float32 [dimensions] of length 1.
            count: how many are wanted at most.
            min_similarity: cosine; entries that are less near are left out. By default none is.

        Returns:
            Keys, questions and cosines; some of the entries may have expired since.
        """
        with self._reading():
            return self._indexes.near(scope, vector, count, min_similarity, self._turns)

    def remove(self, keys: Iterable[bytes]) -> int:
        """Remove entries by their keys, in one transaction.

        Args:
            keys: of the entries; those that are not there are passed over.

        Returns:
            How many were there.
        """
        with self._transaction() as writer:
            return sum(writer.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount for key in keys)

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        """Remove the selected entries, in one transaction.

        Args:
            which: selects them; by default all.

        Returns:
            How many there were.
        """
        condition, values = sql_where(which, "?")
        with self._transaction() as writer:
            return writer.execute(f"DELETE FROM entries WHERE {condition}", values).rowcount

    def items(self) -> Iterator[StoredEntry]:
        """Yield all entries that can be read, the newest first; 256 are fetched at a time."""
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
        """Return a number that changes whenever any process removes or replaces an entry."""
        with self._reading():
            return int(self._reader().execute("SELECT removals FROM totals").fetchone()[0])

    def usage(self) -> Usage:
        """Return how full the cache is: entries, bytes, those with embeddings, and the oldest."""
        with self._reading():
            reader = self._reader()
            entries, size, vectors = reader.execute("SELECT entries, bytes, vectors FROM totals").fetchone()
            oldest = reader.execute("SELECT min(created) FROM entries").fetchone()[0]
        return Usage(entries, size, vectors, oldest)

    def describe(self) -> Mapping[str, str]:
        """Describe kind, path, schema and SQLite's version, for people."""
        return {
            "kind": "sqlite",
            "path": str(self.path),
            "schema": str(VERSION),
            "sqlite": sqlite3.sqlite_version,
        }

    def close(self) -> None:
        """Write when entries were last used, if that is possible, and close the file.

        A second call does nothing.
        """
        if self._closed:
            return
        with suppress(BackendDown):  # what was used last is not worth more than leaving
            self._flush()
        self._closed = True
        for connection in self._opened:
            connection.close()

    def _answer(self, key: bytes) -> bytes | None:
        with self._reading():
            row = self._reader().execute(_GET, (key,)).fetchone()
        return None if row is None else row[0]

    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        del vector  # as it is packed
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
            pass  # which writes the uses

    def _changes(self) -> int:
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
        reader: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if reader is None:
            reader = self._readers.connection = self._connect()
        return reader

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path, power_safe=self._power_safe)
        self._opened.append(connection)
        return connection

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise BackendDown(f"{self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Changes that come together, with the uses that were noted since the last ones."""
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
