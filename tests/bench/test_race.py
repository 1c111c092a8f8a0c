"""First seconds of trials beside whole ones: what they tell, and what they cost."""

from __future__ import annotations

import math

import pytest

from pipeline.bench.tune.objective import Outcome, TrialRecord
from pipeline.bench.tune.race import Race, spent


def test_first_seconds_are_held_against_the_best_by_the_noise_that_they_have_had() -> None:
    race = Race.of([(50.0, math.log(100.0)), (60.0, math.log(120.0)), (0.0, math.log(90.0))])
    assert race is not None
    assert math.exp(race.best) == pytest.approx(120.0)
    assert math.exp(race.expected(40.0)) == pytest.approx(80.0)
    assert race.is_lost(55.0)
    assert not race.is_lost(58.0)
    noisy = Race.of([(50.0, math.log(100.0)), (60.0, math.log(80.0)), (55.0, math.log(110.0))])
    assert noisy is not None
    assert noisy.spread > race.spread
    assert not noisy.is_lost(55.0)
    # Nothing is known yet of how first seconds and whole loads go together.
    only = Race.of([(60.0, math.log(120.0))])
    assert only is not None
    assert not only.is_lost(1.0)
    assert Race.of([]) is None


def test_searches_are_counted_by_the_time_of_whole_trials() -> None:
    def trial(outcome: Outcome, *seconds: float) -> TrialRecord:
        parts = {str(part): value for part, value in enumerate(seconds)}
        return TrialRecord(number=0, settings={}, outcome=outcome, seconds=parts)

    whole = [trial("measured", 10.0, 30.0), trial("measured", 40.0), trial("measured", 400.0)]
    assert spent(whole) == 3
    assert spent([*whole, trial("stopped", 10.0)]) == 3.25
    assert spent([*whole, trial("stopped", 1000.0), trial("failed"), trial("refused"), trial("planned")]) == 5
    assert spent([trial("stopped", 10.0)]) == 1
