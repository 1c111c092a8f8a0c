"""The in-memory indexes of a file's embeddings, one a scope, which follow what all processes write into it.

New entries have larger ids than all before them, so that reading on from the last seen id catches up. Entries that are
gone are noticed when they are found and no longer there.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

import numpy as np

from pipeline.cache.backend import Vector
from pipeline.cache.vectors import VectorIndex

_MAX_VECTORS = 4_000_000  # in memory, of all scopes together; the scope used longest ago goes first
_ROWS = 4096  # read at a time

Open = Callable[[bytes, bytes], bytes]  # (kept, key) -> content


class Follower:
    """Indexes of the scopes that were asked for; safe to use from any number of threads."""

    def __init__(self, connection: sqlite3.Connection, open_kept: Open) -> None:
        """`connection` is used by nobody else: what changed is told by comparing what it saw before."""
        self._connection = connection
        self._open = open_kept
        self._indexes: dict[bytes, VectorIndex] = {}  # in the order of use
        self._seen = 0  # the largest id that is in the indexes
        self._version = -1  # of the file, as the reading connection sees it
        self._lock = threading.Lock()

    def search(self, scope: bytes, vector: Vector, count: int) -> list[tuple[int, float]]:
        """Ids and cosines of the nearest entries of a scope."""
        with self._lock:
            index = self._indexes.pop(scope, None)
            self._catch_up(scope, index)
            if index is None:
                index = self._load(scope, len(vector))
            self._indexes[scope] = index
            self._make_room()
        return index.search(vector, count)

    def forget(self, scope: bytes, ids: list[int]) -> None:
        """These were found and are gone."""
        with self._lock:
            index = self._indexes.get(scope)
        if index is not None:
            index.remove(ids)

    def _catch_up(self, scope: bytes, index: VectorIndex | None) -> None:
        version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return
        self._version = version
        known = self._indexes if index is None else {**self._indexes, scope: index}
        while rows := self._connection.execute(
            "SELECT id, scope, key, vector FROM entries WHERE id > ? ORDER BY id LIMIT ?", (self._seen, _ROWS)
        ).fetchall():
            self._seen = rows[-1][0]
            for owner, into in known.items():
                self._add(
                    into, [(row[0], row[2], row[3]) for row in rows if row[1] == owner and row[3] is not None]
                )

    def _load(self, scope: bytes, dimensions: int) -> VectorIndex:
        index = VectorIndex(dimensions)
        rows = self._connection.execute(
            "SELECT id, key, vector FROM entries WHERE scope = ? AND vector IS NOT NULL AND id <= ?",
            (scope, self._seen),
        )
        while part := rows.fetchmany(16 * _ROWS):
            self._add(index, part)
        return index

    def _add(self, index: VectorIndex, rows: list[tuple[int, bytes, bytes]]) -> None:
        if rows:
            packed = b"".join(self._open(vector, key) for _, key, vector in rows)
            vectors = np.frombuffer(packed, "<f2").reshape(len(rows), -1).astype(np.float32)
            index.add(np.array([row[0] for row in rows], np.int64), vectors)

    def _make_room(self) -> None:
        while len(self._indexes) > 1 and sum(map(len, self._indexes.values())) > _MAX_VECTORS:
            del self._indexes[next(iter(self._indexes))]
