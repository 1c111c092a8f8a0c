"""What each check is worth, on pairs whose similarities and objections are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.cache.semantic.verification import CHECKS
from pipeline.cache.tuning.choosing import by_category, weigh
from pipeline.cache.tuning.measuring import Measured
from pipeline.cache.tuning.pairs import Pair


def drawn(seed: int, count: int = 200) -> Measured:
    rng = np.random.default_rng(seed)
    pairs = [
        Pair(f"a{i}", f"b{i}", bool(rng.integers(2)), ("", "x", "y")[rng.integers(3)]) for i in range(count)
    ]
    objects = rng.random((count, len(CHECKS))) < 0.1
    return Measured(pairs, rng.uniform(0.5, 1, count), objects, tuple(CHECKS))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("skipped", [(), ("words", "order")])
def test_without_a_check_just_what_it_alone_held_is_served(seed: int, skipped: tuple[str, ...]) -> None:
    measured = drawn(seed)
    whole = measured.outcome(0.7, skipped)
    weights = weigh(measured, 0.7, skipped)
    assert [weight.check for weight in weights] == [name for name in CHECKS if name not in skipped]
    for weight in weights:
        without = measured.outcome(0.7, (*skipped, weight.check))
        assert without.false.count - whole.false.count == weight.stopped
        assert without.recall.count - whole.recall.count == weight.lost


def test_categories_add_up_to_the_pairs_that_have_one() -> None:
    measured = drawn(7)
    found = by_category(measured, 0.7)
    assert list(found) == ["x", "y"]
    named = np.array([pair.category != "" for pair in measured.pairs])
    whole = measured.outcome(0.7, (), named)
    assert sum(outcome.recall.count for outcome in found.values()) == whole.recall.count
    assert sum(outcome.recall.of for outcome in found.values()) == whole.recall.of
    assert sum(outcome.false.count for outcome in found.values()) == whole.false.count
    assert sum(outcome.false.of for outcome in found.values()) == whole.false.of
