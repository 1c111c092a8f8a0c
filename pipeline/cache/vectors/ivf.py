"""Vectors in clusters: a search looks into the nearest ones only (an inverted file, IVF).

Each cluster holds its vectors projected to few dimensions, which are scanned; the best of those are ranked again by the
whole vectors, kept as 16-bit fractions (NumPy makes 32-bit floats of those ten times as fast as of 16-bit floats, and
a cosine is right to 0.00002). The projection keeps most of what tells neighbours apart, so that many more
clusters can be looked into in the same time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.vectors.growable_array import Rows
from pipeline.cache.vectors.top_k import largest

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_SCANNED_DIMENSIONS = 64
_SAMPLES_PER_CLUSTER = 24  # that the centres are learned from
_ROUNDS = 6
_UNIT = np.float32(32767)  # what 1.0 is kept as
_CHUNK = 16384  # vectors assigned at a time: bounds the memory of the product


class Clusters:
    """Made once from the vectors that are there; more may be added, and the centres stay."""

    def __init__(self, vectors: Floats, count: int, seed: int = 0) -> None:
        """
        Args:
            vectors: [n, dimensions], length 1.
            count: of clusters.
        """
        rng = np.random.default_rng(seed)
        sample = vectors
        if len(vectors) > count * _SAMPLES_PER_CLUSTER:
            sample = vectors[rng.choice(len(vectors), count * _SAMPLES_PER_CLUSTER, replace=False)]
        self._projection = _principal(sample, min(_SCANNED_DIMENSIONS, vectors.shape[1]))
        self._centres = _centres(sample, count, rng)
        self._scanned = [Rows(self._projection.shape[1], np.float32) for _ in range(count)]
        self._rows = [Rows(None, np.int32) for _ in range(count)]  # where each lies in the two that follow
        self._full = Rows(vectors.shape[1], np.int16)
        self._ids = Rows(None, np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: Ids, vectors: Floats) -> None:
        """Put vectors into the cluster of the nearest centre."""
        for start in range(0, len(ids), _CHUNK):
            part, before = vectors[start : start + _CHUNK], len(self._ids)
            nearest = np.argmax(part @ self._centres.T, axis=1)
            order = np.argsort(nearest, kind="stable")
            scanned = part @ self._projection
            bounds = np.searchsorted(nearest[order], np.arange(len(self._centres) + 1))
            for cluster in np.unique(nearest).tolist():
                rows = order[bounds[cluster] : bounds[cluster + 1]]
                self._scanned[cluster].extend(scanned[rows])
                self._rows[cluster].extend(before + rows)
            self._full.extend(np.clip(np.rint(part * _UNIT), -_UNIT, _UNIT).astype(np.int16))
            self._ids.extend(ids[start : start + _CHUNK])

    def search(self, vector: Floats, probes: int, count: int) -> tuple[Ids, Floats]:
        """Ids and cosines of about the nearest `count`, in no order."""
        chosen = largest(self._centres @ vector, probes).tolist()
        short = vector @ self._projection
        scores = np.concatenate([self._scanned[cluster].array.dot(short) for cluster in chosen])
        rows = np.concatenate([self._rows[cluster].array for cluster in chosen])
        best = rows[largest(scores, count)]
        whole = self._full.array.take(best, axis=0).astype(np.float32)
        return self._ids.array[best], whole @ (vector / _UNIT)

    def vectors(self) -> tuple[Ids, Floats]:
        """Everything, for making clusters anew."""
        return self._ids.array, self._full.array / _UNIT


def _principal(sample: Floats, dimensions: int) -> Floats:
    """The directions [all, dimensions] along which the sample is largest; not centred: products stay products."""
    _, directions = np.linalg.eigh((sample.T @ sample) / len(sample))
    return np.ascontiguousarray(directions[:, -dimensions:], np.float32)


def _centres(sample: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Spherical k-means."""
    centres = sample[rng.choice(len(sample), count, replace=False)]
    for _ in range(_ROUNDS):
        nearest = np.concatenate(
            [np.argmax(sample[at : at + _CHUNK] @ centres.T, axis=1) for at in range(0, len(sample), _CHUNK)]
        )
        order = np.argsort(nearest, kind="stable")
        present, starts = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(sample[order], starts, axis=0)
        centres = centres.copy()
        centres[present] = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        empty = np.setdiff1d(np.arange(count), present)
        centres[empty] = sample[rng.choice(len(sample), len(empty), replace=False)]
    return np.ascontiguousarray(centres, np.float32)
