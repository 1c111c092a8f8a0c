"""Indexes in memory of the embeddings that a database holds, one a scope, which follow what all processes write there.

New entries have larger ids than all before them, so that reading on from the last seen id catches up. Entries that are
gone are noticed when they are found here and no longer there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.cache.backend import Candidate, Vector
from pipeline.cache.codec import Vault
from pipeline.cache.vectors.index import VectorIndex

_MAX_VECTORS = 4_000_000  # in memory, of all scopes together; the scope used longest ago goes first
_MAX_SCOPES = 4096  # each conversation is one, and most hold a single question
_ROWS = 4096  # read at a time

Row = tuple[
    int, bytes, bytes | None
]  # id, key, what the vault made of the embedding; None if it has just gone
# Key and kept question of the entries with these ids; None for one that is gone.
Fetch = Callable[[Sequence[int]], Sequence[tuple[bytes, bytes] | None]]
ReadOn = Callable[[bytes, int, int], Sequence[Row]]  # (scope, after this id, at most so many), rising


class Follower:
    """Indexes of the scopes that were asked for; safe to use from any number of threads."""

    def __init__(self, vault: Vault, read_on: ReadOn, version: Callable[[], int] | None = None) -> None:
        """`version` changes whenever the database does; without, each search reads on."""
        self._vault = vault
        self._read_on = read_on
        self._version = version
        self._scopes: dict[bytes, _Scope] = {}  # in the order of use
        self._vectors = 0  # of all scopes, as they were counted when each was last asked for
        self._lock = threading.Lock()

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float, fetch: Fetch
    ) -> list[Candidate]:
        """The nearest entries of a scope that `fetch` finds, the nearest first."""
        index = self._index(scope, vector)
        asked = count
        while True:
            found = index.search(vector, asked, min_similarity)
            fetched = fetch([id for id, _ in found]) if found else []
            gone = [id for (id, _), entry in zip(found, fetched, strict=True) if entry is None]
            near = [
                (*entry, cosine)
                for (_, cosine), entry in zip(found, fetched, strict=True)
                if entry is not None
            ]
            if not gone or len(near) >= count:
                return self._vault.candidates(near[:count])
            index.remove(gone)
            asked = 2 * asked

    def _index(self, scope: bytes, vector: Vector) -> VectorIndex:
        with self._lock:
            version = None if self._version is None else self._version()
            followed = self._taken(scope) or _Scope(VectorIndex(len(vector)))
            if version is None or version != followed.version:
                self._catch_up(scope, followed, len(vector))
                followed.version = version
            followed.vectors = len(followed.index)
            if followed.vectors:
                self._scopes[scope] = followed
                self._vectors += followed.vectors
                self._make_room()
        return followed.index

    def _catch_up(self, scope: bytes, followed: _Scope, dimensions: int) -> None:
        while rows := self._read_on(scope, followed.seen, _ROWS):
            followed.seen = rows[-1][0]
            opened = [
                (id, self._vault.vector(kept, key, dimensions)) for id, key, kept in rows if kept is not None
            ]
            known = [(id, vector) for id, vector in opened if vector is not None]
            if known:
                ids, vectors = zip(*known, strict=True)
                followed.index.add(np.array(ids, np.int64), np.stack(vectors))

    def _taken(self, scope: bytes) -> _Scope | None:
        """A scope, which is not counted from here on."""
        followed = self._scopes.pop(scope, None)
        if followed is not None:
            self._vectors -= followed.vectors
        return followed

    def _make_room(self) -> None:
        while len(self._scopes) > _MAX_SCOPES or (len(self._scopes) > 1 and self._vectors > _MAX_VECTORS):
            self._taken(next(iter(self._scopes)))


class _Scope:
    __slots__ = ("index", "seen", "vectors", "version")

    def __init__(self, index: VectorIndex) -> None:
        self.index = index
        self.seen = -1  # the largest id that was read
        self.vectors = 0  # in the index when it was last asked for
        self.version: int | None = None
