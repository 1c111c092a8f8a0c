"""Nearest neighbours among unit vectors, in memory: derived from a database, never saved.

`VectorIndex` compares all vectors while there are few, and hands them to Faiss when there are many. `ScopeIndexes`
keeps one such index for each scope, and follows what all processes write to the database and remove from it. It relies
on ids that rise with every write.

Written against faiss-cpu 1.15, which is imported when the first index becomes large.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.backend import ANY, Candidate, Vector
from pipeline.cache.packed_backend import EntryCodec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Vectors that are compared one by one. NumPy takes 0.3 ms for 8,192 of 384 dimensions, where Faiss takes 0.07 ms; for
# 31,000 of them it takes 1.7 ms, and for 100,000 8 ms, as long as the embedding itself or longer.
EXACT = 8192
# So many lists at least, and a quarter of all, are looked into: of 9,675, 31,369 and 100,000 questions (the last ones
# mixed from real ones), the nearest is found in 0.9998, 0.9985 and 0.994 of all searches.
_PROBES = 128
# Faiss is asked for at least so many, and compares eight times as many by their whole vectors: codes rank roughly.
_AT_LEAST = 4
_REFINED = 8
# Vectors that a list is trained on: Faiss warns below 39.
_SAMPLES_PER_LIST = 40
# The lists are trained again at this many times the vectors that they were trained for.
_GROWTH = 4


class VectorIndex:
    """Ids and unit vectors by cosine: exact up to `EXACT` vectors; safe to use from any number of threads."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._count = 0
        # The first `_count` rows of both are in use. There are no vectors here once Faiss has them.
        self._ids: Ids = np.empty(0, np.int64)
        self._vectors: Floats = np.empty((0, dimensions), np.float32)
        # The index of Faiss, if there are many; its row n has the id `_ids[n]`.
        self._lists: Any = None
        self._trained_for = 0
        # Ids that are still among the rows.
        self._removed: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count - len(self._removed)

    def add(self, ids: Ids, vectors: Floats) -> None:
        """Add vectors.

        Args:
            ids: int64 [n], rising, and above all that were ever added.
            vectors: float32 [n, dimensions], of length 1.
        """
        with self._lock:
            self._append(ids, vectors)
            self._rebuild_if_stale()

    def remove(self, ids: Sequence[int]) -> None:
        """Remove vectors, if they are there. Their memory is freed when they are more than half of all rows."""
        with self._lock:
            rows = self._ids[: self._count]
            places = zip(ids, np.searchsorted(rows, ids).tolist(), strict=True)
            self._removed.update(id for id, at in places if at < len(rows) and rows[at] == id)
            self._rebuild_if_stale()

    def search(self, vector: Floats, count: int, min_similarity: float = ANY) -> list[tuple[int, float]]:
        """Find the nearest vectors.

        Args:
            min_similarity: cosine; vectors that are less near are left out.

        Returns:
            Ids and cosines, the nearest first.
        """
        with self._lock:
            rows = count
            while True:
                pairs = self._nearest(vector, rows, min_similarity)
                hits = [pair for pair in pairs if pair[0] not in self._removed]
                if len(hits) >= count or len(pairs) < rows:
                    return hits[:count]
                rows *= 4

    def _nearest(self, vector: Floats, count: int, min_similarity: float) -> list[tuple[int, float]]:
        """Ids and cosines of the nearest rows; fewer than `count` only if no more are near enough."""
        if self._lists is None:
            cosines = self._vectors[: self._count] @ vector
            rows = np.flatnonzero(cosines >= min_similarity)
            if len(rows) > count:
                rows = rows[np.argpartition(cosines[rows], -count)[-count:]]
            rows = rows[np.argsort(-cosines[rows])]
            cosines = cosines[rows]
        else:
            distances, labels = self._lists.search(vector[None], min(max(count, _AT_LEAST), self._count))
            cosines = 1 - distances[0] / 2  # of the squared distance of two vectors of length 1
            near = (labels[0] >= 0) & (cosines >= min_similarity)
            rows, cosines = labels[0][near], cosines[near]
        return list(zip(self._ids[rows].tolist(), cosines.tolist(), strict=True))

    def _append(self, ids: Ids, vectors: Floats) -> None:
        end = self._count + len(ids)
        if end > len(self._ids):
            # Twice the room each time: adding a row costs constant time on average. No view outlives the lock.
            room = max(end, 2 * len(self._ids), 16)
            self._ids.resize(room, refcheck=False)
            if self._lists is None:
                self._vectors.resize((room, self._dimensions), refcheck=False)
        self._ids[self._count : end] = ids
        if self._lists is None:
            self._vectors[self._count : end] = vectors
        else:
            _faiss()
            self._lists.add(np.ascontiguousarray(vectors, np.float32))
        self._count = end

    def _rebuild_if_stale(self) -> None:
        sparse = 2 * len(self._removed) > self._count
        grown = self._count > (EXACT if self._lists is None else _GROWTH * self._trained_for)
        if not (sparse or grown):
            return
        ids = self._ids[: self._count]
        vectors = self._vectors if self._lists is None else self._lists.reconstruct_n(0, self._count)
        present = ~np.isin(ids, np.fromiter(self._removed, np.int64))
        self._ids, self._vectors = ids[present], vectors[: self._count][present]
        self._count, self._lists = len(self._ids), None
        self._removed.clear()
        if self._count > EXACT:
            self._lists = _trained(self._vectors)
            self._lists.add(self._vectors)
            self._vectors = np.empty((0, self._dimensions), np.float32)
            self._trained_for = self._count


def lists_for(vectors: int) -> int:
    """Choose the number of lists: a power of two of at most twice the square root.

    >>> [lists_for(n) for n in (8_193, 100_000, 1_000_000)]
    [128, 512, 1024]
    """
    return int(2 ** np.floor(np.log2(2 * vectors**0.5)))


def _trained(vectors: Floats) -> Any:
    """An empty Faiss index: lists of vectors in 4-bit codes, and all vectors as 16-bit floats to rank the best by."""
    faiss = _faiss()
    count, dimensions = vectors.shape
    lists = lists_for(count)
    # A code stands for four dimensions, where that divides them.
    codes = next(dimensions // width for width in (4, 2, 1) if dimensions % width == 0)
    index: Any = faiss.index_factory(dimensions, f"IVF{lists},PQ{codes}x4fs,Refine(SQfp16)", faiss.METRIC_L2)
    samples = np.random.default_rng(0).permutation(count)[: _SAMPLES_PER_LIST * lists]
    index.train(vectors[samples])
    index.k_factor = _REFINED
    faiss.extract_index_ivf(index).nprobe = max(_PROBES, lists // 4)
    return index


def _faiss() -> Any:
    """Import Faiss, and let it use one thread where this thread calls it.

    The threads of OpenMP spin while they wait for each other: on two busy cores, training took nine times as long.
    """
    import faiss

    faiss.omp_set_num_threads(1)
    return faiss


# Vectors in memory, of all scopes together; the scope used longest ago goes first.
_MAX_VECTORS = 4_000_000
# Each conversation is a scope, and most hold a single question.
_MAX_SCOPES = 4096
# Rows that are read at a time.
_ROWS = 4096

# (id, key of the entry, its packed embedding, or None if the entry has just gone)
Row = tuple[int, bytes, bytes | None]
# ids -> for each, the key and the packed question of its entry; None for one that is gone
Fetch = Callable[[Sequence[int]], Sequence[tuple[bytes, bytes] | None]]
# (scope, id, limit) -> at most so many rows of the scope above that id, by rising id
ReadAfter = Callable[[bytes, int, int], Sequence[Row]]


class ScopeIndexes:
    """One index for each scope that was searched; safe to use from any number of threads.

    New entries are read by their ids, which are larger than all before them. That an entry is gone is noticed when it
    is found here and no longer in the database.
    """

    def __init__(
        self, vault: EntryCodec, read_after: ReadAfter, version: Callable[[], int] | None = None
    ) -> None:
        """
        Args:
            vault: unpacks embeddings and questions.
            read_after: reads rows of the database.
            version: a number that changes whenever the database does; without it, each search reads on.
        """
        self._codec = vault
        self._read_after = read_after
        self._version = version
        self._scopes: dict[bytes, _Scope] = {}  # in the order of use
        self._vectors = 0  # of all scopes, as they were counted when each was last searched
        self._lock = threading.Lock()

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float, fetch: Fetch
    ) -> list[Candidate]:
        """Find the nearest entries of a scope that are still there, the nearest first.

        Args:
            vector: float32 [dimensions], of length 1.
            min_similarity: cosine; entries that are less near are left out.
            fetch: reads the entries of ids from the database.
        """
        index = self._index(scope, vector)
        wanted = count
        while True:
            hits = index.search(vector, wanted, min_similarity)
            fetched = fetch([id for id, _ in hits]) if hits else []
            gone = [id for (id, _), entry in zip(hits, fetched, strict=True) if entry is None]
            near = [
                (*entry, cosine)
                for (_, cosine), entry in zip(hits, fetched, strict=True)
                if entry is not None
            ]
            if not gone or len(near) >= count:
                return self._codec.candidates(near[:count])
            index.remove(gone)
            wanted *= 2

    def _index(self, scope: bytes, vector: Vector) -> VectorIndex:
        with self._lock:
            version = None if self._version is None else self._version()
            scope_index = self._pop(scope) or _Scope(VectorIndex(len(vector)))
            if version is None or version != scope_index.version:
                self._catch_up(scope, scope_index, len(vector))
                scope_index.version = version
            scope_index.vectors = len(scope_index.index)
            if scope_index.vectors:
                self._scopes[scope] = scope_index
                self._vectors += scope_index.vectors
                self._make_room()
        return scope_index.index

    def _catch_up(self, scope: bytes, scope_index: _Scope, dimensions: int) -> None:
        while rows := self._read_after(scope, scope_index.last_id, _ROWS):
            scope_index.last_id = rows[-1][0]
            unpacked = [
                (id, self._codec.vector(packed, key, dimensions))
                for id, key, packed in rows
                if packed is not None
            ]
            known = [(id, vector) for id, vector in unpacked if vector is not None]
            if known:
                ids, vectors = zip(*known, strict=True)
                scope_index.index.add(np.array(ids, np.int64), np.stack(vectors))

    def _pop(self, scope: bytes) -> _Scope | None:
        """Take a scope out, and its vectors out of the sum."""
        scope_index = self._scopes.pop(scope, None)
        if scope_index is not None:
            self._vectors -= scope_index.vectors
        return scope_index

    def _make_room(self) -> None:
        while len(self._scopes) > _MAX_SCOPES or (len(self._scopes) > 1 and self._vectors > _MAX_VECTORS):
            self._pop(next(iter(self._scopes)))


@dataclass(slots=True)
class _Scope:
    index: VectorIndex
    # Largest id that was read.
    last_id: int = -1
    # Number of vectors when the index was last searched.
    vectors: int = 0
    version: int | None = None
