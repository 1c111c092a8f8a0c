"""The backend in memory: entries of one process, as long as it lives; for tests, and where nothing may be stored."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.cache.backend import (
    ALL_ENTRIES,
    ANY,
    Candidate,
    Capacity,
    EntryFilter,
    StoredEntry,
    Usage,
    Vector,
)
from pipeline.cache.entry import CacheEntry
from pipeline.cache.key import Question
from pipeline.cache.vector_index import VectorIndex


@dataclass(slots=True)
class _Row:
    id: int
    question: Question
    entry: CacheEntry
    used: float
    vector_bytes: int

    @property
    def bytes(self) -> int:
        return len(self.entry.raw) + len(self.question.turn.encode()) + self.vector_bytes

    def is_of(self, which: EntryFilter) -> bool:
        """Whether it matches everything that is given."""
        return all(getattr(self.question, name) == id for name, id in which.ids().items()) and (
            which.before is None or self.entry.created < which.before
        )


class InMemoryBackend:
    """See `pipeline.cache.backend.Backend`.

    >>> InMemoryBackend(Capacity(entries=100)).usage().entries
    0
    """

    remote = False

    def __init__(self, capacity: Capacity | None = None) -> None:
        self._capacity = capacity or Capacity()
        self._rows: dict[bytes, _Row] = {}  # in the order of use
        self._keys: dict[int, bytes] = {}  # of entries with an embedding
        self._indexes: dict[tuple[bytes, int], VectorIndex] = {}  # by scope and dimensions
        self._ids = itertools.count()
        self._bytes = self._removals = 0
        self._lock = threading.RLock()

    def get(self, key: bytes, now: float) -> CacheEntry | None:
        with self._lock:
            row = self._rows.get(key)
            if row is None or row.entry.expires <= now:
                return None
            row.used = now
            self._rows[key] = self._rows.pop(key)
            return row.entry

    def put(self, question: Question, entry: CacheEntry, vector: Vector | None = None) -> None:
        with self._lock:
            row = _Row(
                next(self._ids), question, entry, entry.created, 0 if vector is None else 2 * len(vector)
            )
            self._drop([question.key])
            if row.bytes > self._capacity.bytes:
                return
            self._make_room(row)
            self._rows[question.key] = row
            self._bytes += row.bytes
            if vector is not None:
                self._keys[row.id] = question.key
                index = self._indexes.setdefault((question.scope, len(vector)), VectorIndex(len(vector)))
                index.add(np.array([row.id]), np.asarray(vector, np.float32)[None])

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        with self._lock:
            index = self._indexes.get((scope, len(vector)))
            nearest = [] if index is None else index.search(vector, count, min_similarity)
            rows = [(self._rows[self._keys[id]], cosine) for id, cosine in nearest]
        return [Candidate(row.question.key, row.question.turn, cosine) for row, cosine in rows]

    def remove(self, keys: Iterable[bytes]) -> int:
        with self._lock:
            return self._drop(keys)

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        with self._lock:
            return self._drop([key for key, row in self._rows.items() if row.is_of(which)])

    def items(self) -> Iterator[StoredEntry]:
        with self._lock:
            rows = sorted(self._rows.values(), key=lambda row: -row.id)
        for row in rows:
            asked = row.question
            yield StoredEntry(
                asked.key, asked.scope, asked.engine, asked.tenant, asked.turn, row.entry, row.used,
                row.vector_bytes > 0,
            )  # fmt: skip

    def removals(self) -> int:
        return self._removals

    def unreadable(self) -> int:
        return 0

    def usage(self) -> Usage:
        with self._lock:
            oldest = min((row.entry.created for row in self._rows.values()), default=None)
            return Usage(len(self._rows), self._bytes, len(self._keys), oldest)

    def describe(self) -> Mapping[str, str]:
        return {"kind": "memory"}

    def close(self) -> None:
        """Entries stay for as long as this object does."""

    def _drop(self, keys: Iterable[bytes]) -> int:
        gone = [row for key in keys if (row := self._rows.pop(key, None)) is not None]
        for row in gone:
            self._bytes -= row.bytes
            if row.vector_bytes:
                del self._keys[row.id]
                place = (row.question.scope, row.vector_bytes // 2)
                self._indexes[place].remove([row.id])
                if not len(self._indexes[place]):
                    del self._indexes[place]
        self._removals += len(gone)
        return len(gone)

    def _make_room(self, row: _Row) -> None:
        most = self._capacity
        if len(self._rows) < most.entries and self._bytes + row.bytes <= most.bytes:
            return
        self._drop([key for key, old in self._rows.items() if old.entry.expires <= row.entry.created])
        while self._rows and (len(self._rows) >= most.entries or self._bytes + row.bytes > most.bytes):
            self._drop([next(iter(self._rows))])
