"""Percentiles and their intervals: against numpy, and against distributions whose percentiles are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.bench.result import Distribution
from pipeline.bench.statistics import (
    PERCENTILES,
    histogram,
    percentile_intervals,
    percentiles,
    pooled_intervals,
)

LATENCIES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=300)


@settings(max_examples=20)
@given(values=LATENCIES)
def test_figures_are_those_of_numpy_and_intervals_hold_them(values: list[float]) -> None:
    found = Distribution.of([[value] for value in values])
    assert found is not None
    assert found.count == len(values)
    for percent in PERCENTILES:
        assert found.at(percent) == pytest.approx(np.percentile(values, percent), abs=1e-3)
        interval = found.intervals[f"p{percent}"]
        assert interval is None or interval[0] - 1e-3 <= found.at(percent) <= interval[1] + 1e-3
    edges, counts = histogram(values)
    assert sum(counts) == len(values)
    assert edges == sorted(edges)


def test_few_values_have_no_interval_of_a_high_percentile() -> None:
    assert percentile_intervals(range(1, 100))[99] is None
    assert percentile_intervals(range(1, 2000))[99] is not None


def test_intervals_cover_what_is_true_as_often_as_they_say() -> None:
    from scipy.stats import lognorm

    chance = np.random.default_rng(1)
    truth = {percent: float(lognorm.ppf(percent / 100, 0.8)) for percent in PERCENTILES}
    hits = dict.fromkeys(PERCENTILES, 0)
    for _ in range(60):
        found = percentile_intervals(chance.lognormal(0, 0.8, 800))
        for percent, interval in found.items():
            assert interval is not None
            hits[percent] += interval[0] <= truth[percent] <= interval[1]
    # Of 60 intervals at 95 %, fewer than 52 cover with a probability of 1 in 200.
    assert all(count >= 52 for count in hits.values()), hits


def test_gaps_of_one_answer_are_not_independent_witnesses() -> None:
    """Answers differ more than gaps within one: an interval that took all gaps alike would miss what is true."""
    chance = np.random.default_rng(2)
    clustered = alone = 0
    for _ in range(40):
        speeds = chance.lognormal(2, 0.5, 60)
        groups = [speed * chance.lognormal(0, 0.05, 50) for speed in speeds]
        # The median over all answers that there could be.
        truth = np.exp(2)
        found = pooled_intervals(groups)[50]
        naive = percentile_intervals(np.concatenate(groups))[50]
        assert found is not None
        assert naive is not None
        clustered += found[0] <= truth <= found[1]
        alone += naive[0] <= truth <= naive[1]
    assert clustered >= 34
    assert alone < 20


def test_many_answers_are_drawn_in_groups_that_say_the_same() -> None:
    chance = np.random.default_rng(3)
    groups = [speed * chance.lognormal(0, 0.1, 5) for speed in chance.lognormal(2, 0.5, 5000)]
    found = pooled_intervals(groups)[95]
    whole = percentiles(np.concatenate(groups))[95]
    assert found is not None
    assert found[0] <= whole <= found[1]
    assert found[1] / found[0] < 1.25
