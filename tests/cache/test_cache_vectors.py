"""The index: exact while small, nearly so when large, whatever is added and removed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.cache.vectors import VectorIndex
from pipeline.cache.vectors.index import EXACT
from pipeline.cache.vectors.top_k import largest

Vectors = NDArray[np.float32]


def clustered(count: int, seed: int, dimensions: int = 96, topics: int = 40) -> Vectors:
    """Vectors around topics, as sentences are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((topics, dimensions))
    spread = rng.standard_normal((count, dimensions)) * 0.6
    return unit(centres[rng.integers(topics, size=count)] + spread)


def unit(vectors: NDArray[np.float64]) -> Vectors:
    normed: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return normed


@settings(max_examples=30)
@given(st.integers(1, 200), st.sets(st.integers(0, 199)), st.integers(1, 10), st.integers(0, 99))
def test_a_small_index_is_exact(size: int, removed: set[int], count: int, seed: int) -> None:
    vectors = clustered(size, seed)
    query = clustered(1, seed + 1)[0]
    index = VectorIndex(vectors.shape[1])
    index.add(np.arange(size), vectors)
    index.remove([id for id in removed if id < size])
    kept = [id for id in range(size) if id not in removed]
    expected = sorted(kept, key=lambda id: -float(vectors[id] @ query))[:count]
    found = index.search(query, count)
    assert [id for id, _ in found] == expected
    assert [cosine for _, cosine in found] == pytest.approx(
        [float(vectors[id] @ query) for id in expected], abs=1e-5
    )


@settings(max_examples=100)
@given(
    st.integers(0, 2000),
    st.integers(1, 60),
    st.sampled_from([1, 10, 10**6]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_largest_of_many_values(size: int, count: int, kinds: int, rising: bool, seed: int) -> None:
    values = np.random.default_rng(seed).integers(kinds, size=size).astype(np.float32)
    values = np.sort(values) if rising else values
    found = largest(values, count)
    assert len(set(found.tolist())) == len(found) == min(count, size)
    assert sorted(values[found]) == sorted(values)[max(0, size - count) :]


def test_what_is_not_near_enough_is_not_found() -> None:
    vectors = clustered(3 * EXACT, 5)
    index = VectorIndex(vectors.shape[1])
    index.add(np.arange(len(vectors)), vectors)
    for query in vectors[:20]:
        every = index.search(query, 30)
        assert index.search(query, 30, every[9][1]) == every[:10]
        assert index.search(query, 30, 1.1) == []


def test_a_large_index_finds_the_nearest() -> None:
    vectors = clustered(20_000, 1)
    index = VectorIndex(vectors.shape[1])
    for start in range(0, len(vectors), 1500):  # through tails, clusters, and clusters made anew
        index.add(np.arange(start, min(start + 1500, len(vectors))), vectors[start : start + 1500])
    assert len(index) == len(vectors)
    near = unit(vectors[:1000].astype(float) + np.random.default_rng(2).standard_normal((1000, 96)) * 0.03)
    exact = np.argmax(near @ vectors.T, axis=1)
    found = [index.search(query, 1)[0][0] for query in near]
    assert np.mean(np.array(found) == exact) >= 0.99


def test_what_was_removed_is_not_found_and_its_room_is_freed() -> None:
    vectors = clustered(3 * EXACT, 3)
    index = VectorIndex(vectors.shape[1])
    index.add(np.arange(len(vectors)), vectors)
    index.remove([0, 1])
    assert index.search(vectors[0], 1)[0][0] != 0
    assert len(index) == len(vectors) - 2
    more = clustered(10 * EXACT, 4)
    index.add(np.arange(len(vectors), len(vectors) + len(more)), more)
    assert len(index) == len(vectors) + len(more) - 2
    assert index.search(vectors[1], 1)[0][0] != 1
    assert index._gone == set()


def test_nothing_is_near_in_an_empty_index() -> None:
    assert VectorIndex(8).search(np.ones(8, np.float32), 3) == []
