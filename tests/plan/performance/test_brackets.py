"""Brackets around forecasts, on errors whose distribution is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.plan.performance.brackets import ClassErrors, Kin, bracket, coverage
from pipeline.plan.performance.estimates import COVERAGE

CHANCE = np.random.default_rng(7)


def errors(set_ups: int, scale: float, bias: float = 0.0, most: int = 5) -> ClassErrors:
    """Draw errors that are alike within a set-up."""
    counts = CHANCE.integers(1, most + 1, set_ups)
    places = np.repeat(np.arange(set_ups), counts)
    offs = CHANCE.normal(bias, scale, set_ups)[places] + CHANCE.normal(0, scale / 3, len(places))
    return ClassErrors(offs, places)


def held(own: ClassErrors, ends: tuple[float, float]) -> float:
    """Share of set-ups whose measurements lie within, each counted once."""
    low, high = np.log(ends)
    inside = (own.offs >= low) & (own.offs <= high)
    return float((inside * own.weights).sum() / own.set_ups)


@pytest.mark.parametrize("set_ups", [4, 12, 40])
def test_a_set_up_that_is_not_seen_is_held_as_often_as_promised(set_ups: int) -> None:
    """On average over classes of every width and bias; of few set-ups a little more often, never much less."""
    shares, told = [], []
    for _ in range(40):
        kin = Kin.of([errors(15, CHANCE.uniform(0.05, 0.3), CHANCE.normal(0, 0.1)) for _ in range(2)])
        scale, bias = CHANCE.uniform(0.05, 0.3), CHANCE.normal(0, 0.1)
        draws = errors(set_ups, scale, bias)
        shares.append(held(errors(200, scale, bias), bracket(draws, kin)))
        found = coverage(draws, kin)
        assert found is not None
        told.append(found.share)
    assert COVERAGE - 0.03 <= np.mean(shares) <= COVERAGE + 0.07
    # What a class tells of itself, each set-up against the others, is what others see.
    assert np.mean(told) == pytest.approx(np.mean(shares), abs=0.05)


def test_a_set_up_counts_once_however_many_measurements_it_has() -> None:
    few = ClassErrors.of([0.1, -0.1, 0.05, -0.05, 0.2], list("abcde"))
    many = ClassErrors.of([0.1, -0.1, 0.05, -0.05, *[0.2] * 50], [*"abcd", *"e" * 50])
    assert bracket(many, None) == pytest.approx(bracket(few, None))


def test_brackets_have_not_seen_the_set_up_that_they_are_held_against() -> None:
    """An odd set-up is never held, since no other is like it; with it, the bracket is wider."""
    usual = ClassErrors.of([0.02, -0.02, 0.03, -0.03, 0.01, -0.01] * 3, range(18))
    odd = ClassErrors.of([*usual.offs.tolist(), 3.0], range(19))
    found = coverage(odd, None)
    assert found is not None
    assert found.share <= 18 / 19
    assert bracket(odd, None)[1] >= bracket(usual, None)[1]
    assert coverage(ClassErrors.of([0.1, 0.2], ["a", "a"]), None) is None


def test_a_small_class_borrows_the_width_of_its_kin() -> None:
    small = ClassErrors.of([0.01, -0.01, 0.02], "abc")
    wide, narrow = (Kin.of([errors(40, scale)]) for scale in (0.5, 0.02))
    large = errors(400, 0.1)
    (few_wide, few_narrow), (many_wide, many_narrow) = (
        [math.log(bracket(own, kin)[1]) for kin in (wide, narrow)] for own in (small, large)
    )
    assert few_wide > 2 * few_narrow
    assert many_wide == pytest.approx(many_narrow, rel=0.15)
    assert Kin.of([]) is None
