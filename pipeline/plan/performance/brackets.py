"""Brackets around forecasts: conformal intervals by set-up, in which a small class borrows from its kin.

Measurements of one set-up (model, GPU, format, split, lengths) are off together. So set-ups are what is exchangeable,
and each counts once, however many measurements it has: hierarchical conformal prediction (Lee, Barber, Willett, 2023).

    reach    how far a tenth of the errors lie below 0, and above, of the class and of its kin: classes of the same
             quantity and structure. A class of K set-ups weighs K, its kin `KIN`
    score    an error over the reach of the other set-ups; those of the kin over the reach of theirs
    bracket  the reach times the quantile of the scores that holds a set-up not seen as often as `COVERAGE`: of
             K + KIN + 1 set-ups, because the score of the one not seen may be as large as can be

`coverage` judges: a set-up is held against a bracket that neither it nor its score has had a part in.
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

KIN = 6.0  # set-ups that the kin of a class count for
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
        scores: Score of each of their set-ups, over the reach of its own class.
    """

    reach: tuple[float, float]
    scores: Values

    @classmethod
    def of(cls, classes: Sequence[ClassErrors]) -> Self | None:
        """Take classes together, each counted with the set-ups that it has; None: there are none."""
        if not classes:
            return None
        reaches = np.log([_reach(errors, None) for errors in classes])
        low, high = np.exp(np.average(reaches, axis=0, weights=[errors.set_ups for errors in classes]))
        return cls((float(low), float(high)), np.concatenate([_set_up_scores(errors) for errors in classes]))


def bracket(own: ClassErrors, kin: Kin | None) -> tuple[float, float]:
    """Set a bracket around forecasts of a class.

    Args:
        own: Errors of the class, each from a fit without its set-up.
        kin: Errors that it borrows.

    Returns:
        Factors of a forecast, below and above 1.
    """
    values, weights = _scores(own, kin), own.weights
    if kin is not None:
        values = np.concatenate([values, kin.scores])
        weights = np.concatenate([weights, np.full(len(kin.scores), KIN / len(kin.scores))])
    wide = _quantile(values, weights, COVERAGE, unseen=1.0)
    low, high = _reach(own, kin)
    return math.exp(-wide * low), math.exp(wide * high)


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


def _scores(own: ClassErrors, kin: Kin | None) -> Values:
    """Divide each error by the reach of the other set-ups."""
    scores = np.ones(len(own.offs))
    if own.set_ups > 1:
        for part in own.parts():
            low, high = _reach(own.without(part), kin)
            scores[part] = np.maximum(own.offs[part] / high, -own.offs[part] / low)
    elif kin is not None:
        scores = np.maximum(own.offs / kin.reach[1], -own.offs / kin.reach[0])
    return scores


def _set_up_scores(own: ClassErrors) -> Values:
    """Return the median score of each set-up."""
    scores = _scores(own, None)
    return np.array([np.median(scores[own.places == place]) for place in np.unique(own.places)])


def _reach(own: ClassErrors, kin: Kin | None) -> tuple[float, float]:
    """Return how far errors reach below 0 and above: those of the class, drawn towards its kin."""
    tail = (1 - COVERAGE) / 2
    low = max(-_quantile(own.offs, own.weights, tail), _LEAST)
    high = max(_quantile(own.offs, own.weights, 1 - tail), _LEAST)
    if kin is None:
        return low, high
    share = own.set_ups / (own.set_ups + KIN)
    return low**share * kin.reach[0] ** (1 - share), high**share * kin.reach[1] ** (1 - share)


def _quantile(values: Values, weights: Values, share: float, unseen: float = 0.0) -> float:
    """Return a weighted quantile, on a straight line between values.

    Args:
        unseen: Weight of a value that is as large as can be, for which the largest one stands.
    """
    order = np.argsort(values, kind="stable")
    ordered, counted = values[order], weights[order]
    middles = np.cumsum(counted) - counted / 2
    return float(np.interp(share * (counted.sum() + unseen), middles, ordered))
