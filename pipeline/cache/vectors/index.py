"""An index of unit vectors by cosine: exact while it is small, in clusters when it is large.

New vectors go to a tail that is compared one by one, and from there, many at a time, into their clusters. Clusters are
made anew when there are many more vectors than they were made for.
"""

from __future__ import annotations

import threading

import numpy as np

from pipeline.cache.backend import ANY
from pipeline.cache.vectors.growable_array import Rows
from pipeline.cache.vectors.ivf import Clusters, Floats, Ids
from pipeline.cache.vectors.top_k import largest

EXACT = 2048  # vectors that are compared one by one while there are no clusters
_TAIL = 256  # and beside them
_PROBES = 16  # clusters that a search looks into
_RANKED = 24  # candidates that are ranked by their full vectors
_GROWTH = 4  # clusters are made anew at this many times the vectors they were made for


class VectorIndex:
    """Ids and unit vectors; safe to use from any number of threads."""

    def __init__(self, dimensions: int) -> None:
        self._tail = Rows(dimensions, np.float32)
        self._tail_ids = Rows(None, np.int64)
        self._clusters: Clusters | None = None
        self._made_for = 0
        self._gone: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tail) + len(self._clusters or ()) - len(self._gone)

    def add(self, ids: Ids, vectors: Floats) -> None:
        """Add vectors, float32 [n, dimensions] of length 1, under ids that are not there yet."""
        with self._lock:
            self._tail.extend(vectors)
            self._tail_ids.extend(ids)
            if len(self._tail) > (EXACT if self._clusters is None else _TAIL):
                self._settle()

    def remove(self, ids: list[int]) -> None:
        """They are not found any more. Their room is freed when clusters are made anew."""
        with self._lock:
            self._gone.update(ids)

    def search(self, vector: Floats, count: int, min_similarity: float = ANY) -> list[tuple[int, float]]:
        """Ids and cosines of the nearest of those that are near enough, nearest first."""
        with self._lock:
            ids, similarities = self._tail_ids.array, self._tail.array @ vector
            if self._clusters is not None:
                found, cosines = self._clusters.search(vector, _PROBES, max(_RANKED, count))
                ids, similarities = np.concatenate((ids, found)), np.concatenate((similarities, cosines))
            near = np.flatnonzero(similarities >= min_similarity)
            best = near[largest(similarities[near], count + len(self._gone))]
            order = best[np.argsort(-similarities[best])]
            pairs = zip(ids[order].tolist(), similarities[order].tolist(), strict=True)
            return [(id, cosine) for id, cosine in pairs if id not in self._gone][:count]

    def _settle(self) -> None:
        """Move the tail into clusters."""
        total = len(self._tail) + len(self._clusters or ())
        ids, vectors = self._tail_ids.array, self._tail.array
        if self._clusters is None or total > _GROWTH * self._made_for:
            if self._clusters is not None:
                old_ids, old = self._clusters.vectors()
                ids, vectors = np.concatenate((old_ids, ids)), np.concatenate((old, vectors))
            if self._gone:
                kept = ~np.isin(ids, np.fromiter(self._gone, np.int64))
                ids, vectors = ids[kept], vectors[kept]
                self._gone.clear()
            self._clusters = Clusters(vectors, clusters_for(len(vectors)))
            self._made_for = len(vectors)
        self._clusters.add(ids, vectors)
        self._tail.clear()
        self._tail_ids.clear()


def clusters_for(vectors: int) -> int:
    """How many clusters: a power of two near twice the square root.

    >>> [clusters_for(n) for n in (2_049, 100_000, 1_000_000)]
    [128, 512, 2048]
    """
    return int(2 ** round(np.log2(max(4.0, 2 * vectors**0.5))))
