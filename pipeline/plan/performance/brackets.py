"""Brackets around forecasts: conformal intervals by set-up, in which a small class borrows from its kin.

Measurements of one set-up (model, GPU, format, split, lengths) are off together. So set-ups are what is exchangeable,
and each counts once, however many measurements it has: hierarchical conformal prediction (Lee, Barber, Willett, 2023).

Each end is a bound of its own, beyond which a tenth shall lie: of K set-ups in order, i of K + 1 lie below the one at
place i, on average, and between two places on a straight line. So a class of `ENOUGH` set-ups, which are as many as put
one beyond each end, takes nothing from others: what its brackets hold does not hang on other classes being like it.
With fewer, nothing of its own tells where an end is: errors of the kin, classes of the same quantity and structure,
make up for the set-ups that lack.

    reach    how far a tenth of the errors lie below 0, and above. A class of K set-ups weighs K, its kin `KIN`
    score    an error of the kin over the reach of the other set-ups of its class; times the reach of the class that
             borrows, it stands among the errors of that

`coverage` judges: a set-up is held against a bracket that it has had no part in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from pipeline.plan.performance.estimates import COVERAGE

Values = npt.NDArray[np.float64]
Reach = tuple[float, float]

KIN = 6.0  # set-ups that the kin of a class count for in its reach
_TAIL = (1 - COVERAGE) / 2  # share of set-ups beyond each end
ENOUGH = round(1 / _TAIL) - 1  # set-ups of which one lies beyond each end
_LEAST = 0.01  # logarithm; no bracket reaches less far
_PARTS = 24  # set-ups are left out in so many parts, where there are more


@dataclass(frozen=True)
class ClassErrors:
    """Errors of the measurements of a class.

    Attributes:
        offs: Logarithms of measured over computed.
        places: Number of the set-up of each, from 0.
    """

    offs: Values
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, offs: Sequence[float], set_ups: Iterable[object]) -> Self:
        """Number the set-ups in their order."""
        numbers: dict[object, int] = {}
        places = [numbers.setdefault(set_up, len(numbers)) for set_up in set_ups]
        return cls(np.array(offs, float), np.array(places))

    def without(self, left_out: npt.NDArray[np.bool_]) -> ClassErrors:
        """Leave measurements out."""
        kept = np.unique(self.places[~left_out], return_inverse=True)[1]
        return ClassErrors(self.offs[~left_out], kept)

    @property
    def set_ups(self) -> int:
        """Set-ups that there are."""
        return int(self.places.max()) + 1

    def parts(self) -> Iterator[npt.NDArray[np.bool_]]:
        """Yield the measurements to leave out together: those of a set-up, or of every so many set-ups."""
        for part in range(min(self.set_ups, _PARTS)):
            yield self.places % _PARTS == part

    @property
    def weights(self) -> Values:
        """Weight of each measurement, of which a set-up has 1."""
        return 1.0 / np.bincount(self.places)[self.places]


@dataclass(frozen=True)
class Kin:
    """Errors that a small class borrows: those of other classes of its quantity and structure.

    Attributes:
        reach: Geometric mean of how far their errors reach below 0, and above.
        scores: Scores of their errors, with the sign of the error.
        weights: Weight of each score; all of them have 1.
    """

    reach: Reach
    scores: Values
    weights: Values

    @classmethod
    def of(cls, classes: Sequence[ClassErrors]) -> Self | None:
        """Take classes together, each counted with the set-ups that it has; None: there are none."""
        reach = _mean_reach(classes)
        if reach is None:
            return None
        others = [[other for other in classes if other is not errors] for errors in classes]
        scores = [_scores(errors, _mean_reach(rest)) for errors, rest in zip(classes, others, strict=True)]
        weights = np.concatenate([errors.weights for errors in classes])
        return cls(reach, np.concatenate(scores), weights / weights.sum())

    def lent(self, own: ClassErrors) -> Values:
        """Return the errors that they would have if they reached as far as those of a class."""
        low, high = _reach(own, self.reach)
        return np.where(self.scores < 0, self.scores * low, self.scores * high)


def bracket(own: ClassErrors, kin: Kin | None) -> tuple[float, float]:
    """Set a bracket around forecasts of a class.

    Args:
        own: Errors of the class, each from a fit without its set-up.
        kin: Errors that it borrows. With neither these nor enough of its own, its outermost error is an end.

    Returns:
        Factors of a forecast, below and above 1.
    """
    values, weights = own.offs, own.weights
    if kin is not None and own.set_ups < ENOUGH:
        values = np.concatenate([values, kin.lent(own)])
        weights = np.concatenate([weights, kin.weights * (ENOUGH - own.set_ups)])
    ordered, counted = _in_order(values, weights)
    below = (np.cumsum(counted) - counted / 2 + 0.5) / (counted.sum() + 1)  # each value, of set-ups not seen
    # A bracket holds the forecast: where less than a tenth lies on one side of that, more lies beyond the other end.
    left = min(float(np.interp(-_LEAST, ordered, below, left=0.0)), _TAIL)
    right = min(1 - float(np.interp(_LEAST, ordered, below, right=1.0)), _TAIL)
    low, high = np.interp([1 - right - COVERAGE, left + COVERAGE], below, ordered)
    return math.exp(min(low, -_LEAST)), math.exp(max(high, _LEAST))


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of set-ups that brackets hold which they had no part in.

    Attributes:
        share: Mean over set-ups of the share of their measurements that are held.
        error: Standard error of that mean.
    """

    share: float
    error: float


def coverage(own: ClassErrors, kin: Kin | None, judged: Values | None = None) -> Coverage | None:
    """Hold each set-up against the bracket of all others; None: there are no others.

    Args:
        judged: Errors that are held against the brackets in place of the class's own.
    """
    if own.set_ups < 2:
        return None
    held = np.zeros(len(own.offs))
    for part in own.parts():
        low, high = np.log(bracket(own.without(part), kin))
        values = (own.offs if judged is None else judged)[part]
        held[part] = (values >= low) & (values <= high)
    shares = np.bincount(own.places, held * own.weights)
    # As of an estimate that counts one set-up more on either side: three of three do not make a certainty.
    share = (shares.sum() + 1) / (len(shares) + 2)
    error = math.sqrt((((shares - share) ** 2).sum() + share**2 + (1 - share) ** 2) / (len(shares) + 2) ** 2)
    return Coverage(float(shares.mean()), error)


def _scores(own: ClassErrors, near: Reach | None) -> Values:
    """Divide each error by the reach of the other set-ups on its side; `near` is the reach of the kin."""
    scores = np.zeros(len(own.offs))
    for part in own.parts():
        # A set-up that is alone has no others; without kin, it reaches as far as it does.
        low, high = (near or _reach(own, None)) if part.all() else _reach(own.without(part), near)
        scores[part] = own.offs[part] / np.where(own.offs[part] < 0, low, high)
    return scores


def _mean_reach(classes: Sequence[ClassErrors]) -> Reach | None:
    """Return the geometric mean of how far errors of classes reach, each counted with the set-ups that it has."""
    if not classes:
        return None
    reaches = np.log([_reach(errors, None) for errors in classes])
    low, high = np.exp(np.average(reaches, axis=0, weights=[errors.set_ups for errors in classes]))
    return float(low), float(high)


def _reach(own: ClassErrors, near: Reach | None) -> Reach:
    """Return how far errors reach below 0 and above: those of the class, drawn towards its kin."""
    low = max(-_quantile(own.offs, own.weights, _TAIL), _LEAST)
    high = max(_quantile(own.offs, own.weights, 1 - _TAIL), _LEAST)
    if near is None:
        return low, high
    share = own.set_ups / (own.set_ups + KIN)
    return low**share * near[0] ** (1 - share), high**share * near[1] ** (1 - share)


def _quantile(values: Values, weights: Values, share: float) -> float:
    """Return the value below which a share lies, on a straight line between values."""
    ordered, counted = _in_order(values, weights)
    return float(np.interp(share * counted.sum(), np.cumsum(counted) - counted / 2, ordered))


def _in_order(values: Values, weights: Values) -> tuple[Values, Values]:
    order = np.argsort(values, kind="stable")
    return values[order], weights[order]
