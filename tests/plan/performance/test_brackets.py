"""Brackets around forecasts, on errors whose distribution is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.plan.performance.brackets import ENOUGH, ClassErrors, Kin, bracket, coverage
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
    """On average over classes of every width and bias."""
    shares, told = [], []
    for _ in range(80):
        kin = Kin.of([errors(15, CHANCE.uniform(0.05, 0.3), CHANCE.normal(0, 0.1)) for _ in range(2)])
        scale, bias = CHANCE.uniform(0.05, 0.3), CHANCE.normal(0, 0.1)
        draws = errors(set_ups, scale, bias)
        shares.append(held(errors(200, scale, bias), bracket(draws, kin)))
        found = coverage(draws, kin)
        assert found is not None
        told.append(found.share)
    assert np.mean(shares) == pytest.approx(COVERAGE, abs=0.04)
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


@pytest.mark.parametrize("set_ups", [20, 28, 40, 55])
def test_what_a_class_tells_of_itself_is_near_what_is_meant_whatever_its_errors_are(set_ups: int) -> None:
    """Biased, bunched or with odd ones, beside kin that are nothing like it: at most one is amiss at each end."""
    kin = Kin.of([errors(6, 2.0), errors(5, 0.01, bias=1.0)])
    for _ in range(10):
        odd = CHANCE.standard_t(2, set_ups) * CHANCE.uniform(0.05, 0.3)
        bunched = np.where(CHANCE.random(set_ups) < 0.5, -0.2, 0.2) + CHANCE.normal(0, 0.02, set_ups)
        for offs in (odd, bunched, np.abs(odd)):
            found = coverage(ClassErrors(offs, np.arange(set_ups)), kin)
            assert found is not None
            assert abs(found.share - COVERAGE) * set_ups <= 2


def test_a_class_of_enough_set_ups_needs_no_kin() -> None:
    assert ENOUGH == 9
    wide, narrow = (Kin.of([errors(40, scale)]) for scale in (0.5, 0.02))
    enough = errors(ENOUGH, 0.1)
    assert bracket(enough, wide) == bracket(enough, narrow) == bracket(enough, None)
    # One set-up of the nine, or part of it, lies at each end.
    assert np.log(bracket(ClassErrors(np.arange(-4, 5) / 10, np.arange(9)), None)) == pytest.approx(
        [-0.4, 0.4]
    )
    assert np.log(bracket(ClassErrors(np.arange(-9, 10) / 10, np.arange(19)), None)) == pytest.approx(
        [-0.8, 0.8]
    )


def test_a_small_class_borrows_the_width_of_its_kin() -> None:
    small = ClassErrors.of([0.01, -0.01, 0.02], "abc")
    wide, narrow = (Kin.of([errors(40, scale)]) for scale in (0.5, 0.02))
    few_wide, few_narrow = (math.log(bracket(small, kin)[1]) for kin in (wide, narrow))
    assert few_wide > 2 * few_narrow
    assert Kin.of([]) is None
    # With nothing to borrow, errors reach as far as those that there are.
    alone = ClassErrors.of([0.1, -0.2], "aa")
    assert np.log(bracket(alone, None)) == pytest.approx([-0.2, 0.1])
    borrowed = Kin.of([alone])
    assert borrowed is not None
    assert np.log(bracket(alone, borrowed)) == pytest.approx([-0.2, 0.1], abs=0.05)
