"""What follows a database, scope by scope: how much of it is held in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.cache.codec import Vault
from pipeline.cache.encryption import Plain
from pipeline.cache.vectors import follower
from pipeline.cache.vectors.follower import Follower, Row

KEY = b"k" * 16
ONE = np.eye(4, dtype=np.float32)[0]
VECTOR, TURN = Plain().seal(ONE.astype("<f2").tobytes(), KEY), Plain().seal(b"a question", KEY)


class Database:
    """So many entries in each scope, all of them the same."""

    def __init__(self, **entries: int) -> None:
        self.entries = {name.encode(): count for name, count in entries.items()}
        self.read: list[str] = []  # scopes that were read from the beginning

    def read_on(self, scope: bytes, after: int, limit: int) -> Sequence[Row]:
        if after < 0:
            self.read.append(scope.decode())
        return [(id, KEY, VECTOR) for id in range(after + 1, self.entries.get(scope, 0))][:limit]

    def ask(self, follower: Follower, scope: str) -> int:
        """How many are found."""
        return len(follower.near(scope.encode(), ONE, 9, 0.5, lambda ids: [(KEY, TURN) for _ in ids]))


@pytest.mark.parametrize(("most_scopes", "most_vectors"), [(2, 100), (100, 5)])
def test_the_scope_used_longest_ago_makes_room(
    monkeypatch: pytest.MonkeyPatch, most_scopes: int, most_vectors: int
) -> None:
    monkeypatch.setattr(follower, "_MAX_SCOPES", most_scopes)
    monkeypatch.setattr(follower, "_MAX_VECTORS", most_vectors)
    database = Database(a=2, b=2, c=2)
    following = Follower(Vault(), database.read_on)
    assert [database.ask(following, scope) for scope in "ababcbca"] == [2] * 8
    assert database.read == ["a", "b", "c", "a"]


def test_a_scope_that_grows_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_MAX_VECTORS", 5)
    database = Database(a=1, b=1)
    following = Follower(Vault(), database.read_on)
    for count in (1, 3, 4, 5):
        database.entries[b"a"] = count
        assert (database.ask(following, "a"), database.ask(following, "b")) == (count, 1)
    assert database.read == ["a", "b", "b"]  # with the last one of a, there was no room for b


def test_one_scope_is_held_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_MAX_VECTORS", 5)
    database = Database(a=8)
    following = Follower(Vault(), database.read_on)
    assert [database.ask(following, scope) for scope in ("a", "none", "a")] == [8, 0, 8]
    assert database.read == ["a", "none"]
