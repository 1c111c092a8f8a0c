"""The index: exact while small, nearly so when large, whatever is added and removed; and one for each scope."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.cache import vector_index
from pipeline.cache.encryption import PlainCodec
from pipeline.cache.packed_backend import EntryCodec
from pipeline.cache.vector_index import EXACT, Row, ScopeIndexes, VectorIndex

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


def test_a_large_index_finds_the_nearest_that_are_near_enough() -> None:
    vectors = clustered(5 * EXACT, 1)
    index = VectorIndex(vectors.shape[1])
    for start in range(0, len(vectors), 1500):  # one by one, in lists, and in lists trained again
        index.add(np.arange(start, min(start + 1500, len(vectors))), vectors[start : start + 1500])
    assert len(index) == len(vectors)
    near = unit(vectors[:1000].astype(float) + np.random.default_rng(2).standard_normal((1000, 96)) * 0.03)
    exact = np.argmax(near @ vectors.T, axis=1)
    found = [index.search(query, 1)[0][0] for query in near]
    assert np.mean(np.array(found) == exact) >= 0.99
    # What is not near enough is left out.
    for query in vectors[:20]:
        every = index.search(query, 30)
        assert index.search(query, 30, every[9][1]) == every[:10]
        assert index.search(query, 30, 1.1) == []


@pytest.mark.parametrize("size", [300, 2 * EXACT])
def test_what_was_removed_is_not_found_and_its_memory_is_freed(size: int) -> None:
    vectors = clustered(size, 3)
    index = VectorIndex(vectors.shape[1])
    index.add(np.arange(size), vectors)
    index.remove([0, 1, 1, size])  # the last one was never there
    assert len(index) == size - 2
    assert all(index.search(vectors[id], 1)[0][0] != id for id in (0, 1))
    index.remove(range(100, size))
    assert len(index) == len(index._ids) == 98
    index.remove(range(size))
    assert index.search(vectors[0], 9) == []
    index.add(np.arange(size, 2 * size), vectors)
    assert [index.search(vectors[id], 1)[0][0] for id in range(5)] == list(range(size, size + 5))


def test_nothing_is_near_in_an_empty_index() -> None:
    assert VectorIndex(8).search(np.ones(8, np.float32), 3) == []


KEY = b"k" * 16
ONE = np.eye(4, dtype=np.float32)[0]
VECTOR, TURN = PlainCodec().seal(ONE.astype("<f2").tobytes(), KEY), PlainCodec().seal(b"a question", KEY)


class Database:
    """So many entries in each scope, all of them the same."""

    def __init__(self, **entries: int) -> None:
        self.entries = {name.encode(): count for name, count in entries.items()}
        self.read: list[str] = []  # scopes that were read from the beginning

    def read_after(self, scope: bytes, after: int, limit: int) -> Sequence[Row]:
        if after < 0:
            self.read.append(scope.decode())
        return [(id, KEY, VECTOR) for id in range(after + 1, self.entries.get(scope, 0))][:limit]

    def ask(self, indexes: ScopeIndexes, scope: str) -> int:
        """How many are found."""
        return len(indexes.near(scope.encode(), ONE, 9, 0.5, lambda ids: [(KEY, TURN) for _ in ids]))


@pytest.mark.parametrize(("most_scopes", "most_vectors"), [(2, 100), (100, 5)])
def test_the_scope_used_longest_ago_makes_room(
    monkeypatch: pytest.MonkeyPatch, most_scopes: int, most_vectors: int
) -> None:
    monkeypatch.setattr(vector_index, "_MAX_SCOPES", most_scopes)
    monkeypatch.setattr(vector_index, "_MAX_VECTORS", most_vectors)
    database = Database(a=2, b=2, c=2)
    indexes = ScopeIndexes(EntryCodec(), database.read_after)
    assert [database.ask(indexes, scope) for scope in "ababcbca"] == [2] * 8
    assert database.read == ["a", "b", "c", "a"]


def test_a_scope_that_grows_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "_MAX_VECTORS", 5)
    database = Database(a=1, b=1)
    indexes = ScopeIndexes(EntryCodec(), database.read_after)
    for count in (1, 3, 4, 5):
        database.entries[b"a"] = count
        assert (database.ask(indexes, "a"), database.ask(indexes, "b")) == (count, 1)
    assert database.read == ["a", "b", "b"]  # with the last one of a, there was no room for b


def test_one_scope_is_held_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "_MAX_VECTORS", 5)
    database = Database(a=8)
    indexes = ScopeIndexes(EntryCodec(), database.read_after)
    assert [database.ask(indexes, scope) for scope in ("a", "none", "a")] == [8, 0, 8]
    assert database.read == ["a", "none"]
