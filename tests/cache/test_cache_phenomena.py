"""What makes two questions the same or not, by its kind: each with many words in its slots."""

from __future__ import annotations

import pytest

from pipeline.cache.semantic.scoring import verifier_for
from tests.support.minilm import minilm
from tests.support.phenomena import SAME, TRAPS, Phenomenon

_EACH = 25  # pairs
_MIN_SIMILARITY = 0.45  # a recipe's default


def served(phenomenon: Phenomenon) -> list[tuple[str, str]]:
    embedder = minilm()
    verifier = verifier_for(embedder, scorer=True)
    found = []
    for one, other in phenomenon.pairs(_EACH):
        vectors = embedder(one), embedder(other)
        assert vectors[0] is not None
        assert vectors[1] is not None
        similarity = float(vectors[0] @ vectors[1])
        if similarity >= _MIN_SIMILARITY and verifier.objection(one, other, similarity) is None:
            found.append((one, other))
    return found


@pytest.mark.parametrize("trap", TRAPS, ids=lambda one: one.name)
def test_no_trap_is_served(trap: Phenomenon) -> None:
    assert served(trap) == []


@pytest.mark.parametrize("same", SAME, ids=lambda one: one.name)
def test_most_that_is_the_same_is_served(same: Phenomenon) -> None:
    assert len(served(same)) >= 0.75 * _EACH
