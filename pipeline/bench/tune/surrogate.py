"""A model of what settings are worth, from the trials so far and the plan's forecasts, that proposes the next trial.

    settings = propose(space, trials, forecasts, candidates, seed)

A search has a dozen trials for some ten keys, so the model is a small one: the logarithm of the objective is a sum over
keys, a parabola of the place of each value among its neighbours, or one number for each name or switch. What the plan
forecasts is where its coefficients begin, and each trial moves them (a Bayesian linear regression). The next trial is
the one from which the largest gain over the best so far is expected. Pairs of keys have no coefficients: with
them, searches of a dozen trials found less.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.bench.statistics import Values
from pipeline.bench.tune.search_space import Dimension, SearchSpace, Settings

_PRIOR = 0.15  # standard deviation of a coefficient: what a key may change, as a logarithm
_NOISE = 0.03  # of a trial
_FORECAST_NOISE = 0.1  # of the plan about the order of settings
_PENALTY, _MOST_MISSED = 0.3, 2.0  # by which a trial beyond the SLO counts as worse than the worst within
_DRAWN = 1000


@dataclass(frozen=True, slots=True)
class Observation:
    """One trial.

    Attributes:
        worth: Logarithm of its objective, more being better; None where it is outside the SLO, or did not serve.
        missed: Sum of the shares by which targets were missed.
        noise: Standard deviation of the worth; larger where it is forecast from the first seconds.
    """

    settings: Settings
    worth: float | None
    missed: float = 0.0
    noise: float = _NOISE


def propose(
    space: SearchSpace,
    trials: Sequence[Observation],
    forecasts: Sequence[tuple[Settings, float]],
    allowed: Callable[[Settings], bool],
    seed: str,
) -> Settings | None:
    """Choose the settings of the next trial.

    Args:
        space: Keys and values.
        trials: Trials so far.
        forecasts: Settings, and the objective that the plan forecasts for them, above 0.
        allowed: Whether settings may be tried: none are tried twice.
        seed: The same seed and trials give the same settings.

    Returns:
        The settings; None where none is found that may be tried.
    """
    within = [trial.worth for trial in trials if trial.worth is not None]
    worst = min(within, default=0.0)
    best = max(within, default=worst)
    worths = np.array(
        [
            worst - _PENALTY * (1 + min(_MOST_MISSED, trial.missed)) if trial.worth is None else trial.worth
            for trial in trials
        ]
    )
    model = _Model.of(space, forecasts).after(trials, worths)
    incumbent = max(trials, key=lambda trial: -math.inf if trial.worth is None else trial.worth).settings
    candidates = [
        settings for settings in _candidates(space, incumbent, random.Random(seed)) if allowed(settings)
    ]
    if not candidates:
        return None
    return candidates[int(np.argmax(model.expected_gain(candidates, best)))]


def _candidates(space: SearchSpace, incumbent: Settings, rng: random.Random) -> Iterator[Settings]:
    """Yield the settings that differ from the best in one key or two, and some at random."""
    dimensions = space.dimensions
    for number, dimension in enumerate(dimensions):
        for value in dimension.values:
            changed = {**incumbent, dimension.key: value}
            yield changed
            for other in dimensions[:number]:
                yield from ({**changed, other.key: second} for second in other.values)
    for _ in range(_DRAWN):
        yield {dimension.key: rng.choice(dimension.values) for dimension in dimensions}


@dataclass(frozen=True, slots=True)
class _Model:
    """Normal distribution of the coefficients.

    Attributes:
        mean: [coefficients].
        precision: Inverse of the covariance, [coefficients, coefficients].
        level: Logarithm around which worths lie.
    """

    space: SearchSpace
    mean: Values
    precision: Values
    level: float = 0.0

    @classmethod
    def of(cls, space: SearchSpace, forecasts: Sequence[tuple[Settings, float]]) -> _Model:
        """Make the model before the first trial; of forecasts only the differences count."""
        size = _features(space, [space.own]).shape[1]
        # The first coefficient is the level, which the trials alone tell.
        precision = np.diag([1e-6, *[1 / _PRIOR**2] * (size - 1)])
        if not forecasts:
            return cls(space, np.zeros(size), precision)
        features = _features(space, [settings for settings, _ in forecasts])
        logs = np.log([value for _, value in forecasts])
        fitted = _fit(features, logs - logs.mean(), np.zeros(size), precision, _FORECAST_NOISE)[0]
        fitted[0] = 0.0
        return cls(space, fitted, precision)

    def after(self, trials: Sequence[Observation], worths: Values) -> _Model:
        """Take trials in."""
        level = float(worths.mean())
        features = _features(self.space, [trial.settings for trial in trials])
        noise = np.array([trial.noise for trial in trials])
        mean, precision = _fit(features, worths - level, self.mean, self.precision, noise)
        return _Model(self.space, mean, precision, level)

    def expected_gain(self, settings: Sequence[Settings], best: float) -> Values:
        """Compute the expected gain over the best worth, [settings]."""
        from scipy.stats import norm

        features = _features(self.space, settings)
        variance = np.einsum("ij,ji->i", features, np.linalg.solve(self.precision, features.T))
        spread = np.sqrt(np.maximum(variance, 1e-12))
        gain = features @ self.mean + self.level - best
        expected: Values = gain * norm.cdf(gain / spread) + spread * norm.pdf(gain / spread)
        return expected


def _fit(
    features: Values, worths: Values, mean: Values, precision: Values, noise: Values | float
) -> tuple[Values, Values]:
    """Mean and precision of coefficients after observations."""
    weights = np.broadcast_to(np.asarray(noise, np.float64) ** -2, worths.shape)
    weighted = features.T * weights
    updated = precision + weighted @ features
    return np.linalg.solve(updated, precision @ mean + weighted @ worths), updated


def _features(space: SearchSpace, settings: Sequence[Settings]) -> Values:
    """Features of settings, [settings, coefficients]: 1, and those of each key."""
    columns = [np.ones((len(settings), 1))]
    for dimension in space.dimensions:
        # A switch is not its number.
        places = {(type(value), value): place for place, value in enumerate(dimension.values)}
        parts = np.array([_parts(dimension, place) for place in range(len(places))])
        chosen = (settings_of[dimension.key] for settings_of in settings)
        columns.append(parts[[places[type(value), value] for value in chosen]])
    return np.hstack(columns)


def _parts(dimension: Dimension, place: int) -> list[float]:
    count = len(dimension.values)
    if dimension.ordered and count > 2:
        at = place / (count - 1) - 0.5
        return [at, at * at]
    if count == 2:
        return [place - 0.5]
    return [float(place == number) for number in range(count)]
