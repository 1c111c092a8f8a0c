"""Percentiles of latencies with 95 % intervals, and the ratio of two deployments' figures over rounds. Pure.

A round gives one ratio B/A; what a machine does to both falls out of it. The ratio over rounds is the mean of their
logarithms without the lowest and the highest fifth, so that a round in which the machine was busy with something else
does not decide. Its interval and its tests are Student's t for trimmed means (Tukey and McLaughlin, 1963). Tests are
corrected by Holm for all figures that are looked at together: a package that is compared with itself is called worse in
less than one case of twenty, whatever figure it would be.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)
CONFIDENCE = 0.95

_RESAMPLES = 400
_CLUSTERS = 1000  # at most
_BINS_PER_DOUBLING = 32  # so that a bin is 2.2 % wide
_LEAST_MS, _DOUBLINGS = 0.01, 27  # bins from 0.01 ms to 22 minutes
_EDGES = _LEAST_MS * 2 ** (np.arange(_DOUBLINGS * _BINS_PER_DOUBLING + 1) / _BINS_PER_DOUBLING)
BINS = len(_EDGES) + 1

Values = npt.NDArray[np.float64]
Interval = tuple[float, float]

ALPHA = 1 - CONFIDENCE
LEAST_ROUNDS, MOST_ROUNDS = 3, 400

_TRIM = 0.2  # of the rounds, at each end
_POWER = 0.8
_NOTHING = 1e-9


def percentiles(values: Sequence[float] | Values) -> dict[int, float]:
    """Compute `PERCENTILES` of one or more values, interpolated between neighbours as numpy and AIPerf do."""
    computed = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return dict(zip(PERCENTILES, computed.tolist(), strict=True))


def percentile(values: Sequence[float] | Values, percent: float) -> float:
    """Compute one percentile as `percentiles` does."""
    return float(np.percentile(np.asarray(values, np.float64), percent))


def percentile_intervals(values: Sequence[float] | Values) -> dict[int, Interval | None]:
    """Compute 95 % intervals of percentiles of independent values, whatever their distribution.

    They are intervals between order statistics, from the binomial distribution (`scipy.stats.quantile_test`).

    Returns:
        Percentile -> interval; None where there are too few values for an interval with both ends.
    """
    from scipy.stats import quantile_test

    sample = np.asarray(values, np.float64)
    intervals: dict[int, Interval | None] = {}
    for percent in PERCENTILES:
        test: Any = quantile_test(sample, q=0.0, p=percent / 100)
        low, high = test.confidence_interval(CONFIDENCE)
        intervals[percent] = (float(low), float(high)) if np.isfinite(low) and np.isfinite(high) else None
    return intervals


def pooled_intervals(groups: Sequence[Sequence[float] | Values]) -> dict[int, Interval | None]:
    """Compute 95 % intervals of percentiles over values that come in groups, such as the gaps of each answer.

    Gaps of one answer are alike, so counting each as a witness of its own would promise too much. Whole answers are
    drawn anew (a cluster bootstrap), as histograms with bins of 2 %. Of many answers, those that follow each other are
    drawn together.

    Args:
        groups: Values of each request, in milliseconds.

    Returns:
        Percentile -> interval; None with fewer than two groups.
    """
    filled = [group for group in groups if len(group)]
    if len(filled) < 2:
        return dict.fromkeys(PERCENTILES)
    edges = _EDGES
    clusters = min(len(filled), _CLUSTERS)
    counts = np.zeros((clusters, BINS))
    for number, group in enumerate(filled):
        counts[number * clusters // len(filled)] += binned(group)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES) @ counts
    reached = np.cumsum(drawn, axis=1)
    tail = (1 - CONFIDENCE) / 2
    intervals: dict[int, Interval | None] = {}
    for percent in PERCENTILES:
        rank = reached[:, -1:] * (percent / 100)
        bins = np.minimum((reached < rank).sum(axis=1), len(edges) - 1)
        low, high = np.quantile(edges[np.maximum(bins - 1, 0)], tail), np.quantile(edges[bins], 1 - tail)
        intervals[percent] = (float(low), float(high))
    return intervals


def binned(values: Sequence[float] | Values) -> Values:
    """Count milliseconds in `BINS` bins that are each 2.2 % wide, [BINS]."""
    return np.bincount(np.searchsorted(_EDGES, np.asarray(values, np.float64)), minlength=BINS).astype(
        np.float64
    )


def binned_percentile(counts: Values, percent: float) -> Values:
    """Compute a percentile of values that `binned` counted, between the edges of its bin.

    Args:
        counts: Counts, not all 0, [..., BINS].
        percent: Percentile, 0 to 100.

    Returns:
        Milliseconds, [...].
    """
    reached = np.cumsum(counts, axis=-1)
    rank = reached[..., -1:] * (percent / 100)
    bins = np.minimum((reached < rank).sum(axis=-1), BINS - 2)
    at = bins[..., None]
    inside = np.take_along_axis(counts, at, -1)
    share = 1 - (np.take_along_axis(reached, at, -1) - rank) / np.maximum(inside, 1e-9)
    high: Values = _EDGES[bins] * 2 ** ((np.clip(share[..., 0], 0, 1) - 1) / _BINS_PER_DOUBLING)
    return high


def histogram(values: Sequence[float] | Values, bins: int = 60) -> tuple[list[float], list[int]]:
    """Count values above 0 in bins of equal width on a logarithmic scale: the `bins + 1` edges, and the counts."""
    sample = np.maximum(np.asarray(values, np.float64), 1e-6)
    low, high = float(sample.min()), float(sample.max())
    counts, edges = np.histogram(sample, np.geomspace(low, max(high, low * 1.01), bins + 1))
    return edges.tolist(), counts.tolist()


@dataclass(frozen=True, slots=True)
class Ratio:
    """Estimate of B/A, whose logarithm has Student's t distribution.

    Attributes:
        log: Logarithm of the ratio.
        error: Its standard error.
        free: Degrees of freedom.
    """

    log: float
    error: float
    free: int

    @classmethod
    def of_rounds(cls, rounds: Sequence[tuple[float, float]]) -> Self | None:
        """Compute the ratio from the figures of A and B in each round, above 0; None with fewer than three."""
        if len(rounds) < LEAST_ROUNDS:
            return None
        logs = np.log([b / a for a, b in rounds])
        kept = len(logs) - 2 * int(_TRIM * len(logs))
        return cls(float(_trimmed(logs)), _scatter(logs) / math.sqrt(len(logs)), kept - 1)

    @property
    def interval(self) -> Interval:
        """95 % interval of the ratio."""
        from scipy.stats import t

        reach = self.error * float(t.ppf(1 - ALPHA / 2, self.free))
        return math.exp(self.log - reach), math.exp(self.log + reach)

    @property
    def p(self) -> float:
        """Probability of a ratio at least as far from 1 between equals."""
        at_most = self.p_at_most(1.0)
        return 2 * min(at_most, 1 - at_most)

    def p_at_most(self, ratio: float) -> float:
        """Probability of such an estimate or a larger one, if the true ratio is at most this: a one-sided test."""
        from scipy.stats import t

        # Without any scatter there is nothing to test.
        return float(t.cdf((math.log(ratio) - self.log) / max(self.error, _NOTHING), self.free))


def trimmed_mean(values: Sequence[float]) -> float:
    """Geometric mean of values above 0 without the lowest and the highest fifth."""
    return math.exp(float(_trimmed(np.log(np.asarray(values, np.float64)))))


def scatter(rounds: Sequence[tuple[float, float]]) -> float:
    """Estimate the standard deviation of the logarithm of B/A over two or more rounds, without the outermost."""
    return _scatter(np.log([b / a for a, b in rounds]))


def _trimmed(values: Values) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(values, _TRIM)


def _scatter(ratios: Values) -> float:
    """Standard error of the trimmed mean times the root of the rounds, in place of a standard deviation."""
    from scipy.stats.mstats import trimmed_stde

    if len(ratios) < 1 / _TRIM:
        return float(np.std(ratios, ddof=1))
    return float(trimmed_stde(ratios, (_TRIM, _TRIM))) * math.sqrt(len(ratios))


def share_difference(a: tuple[int, int], b: tuple[int, int], alpha: float = ALPHA) -> Interval:
    """Compute an interval of the difference of two shares, B minus A.

    Newcombe's hybrid of Wilson's intervals ("Interval Estimation for the Difference Between Independent Proportions",
    1998), which holds for shares near 0 and few requests, too.

    Args:
        a: Requests of A that failed, and all of A.
        b: The same of B.
        alpha: Share of cases in which the interval may miss.
    """
    from scipy.stats import binomtest

    (share_a, low_a, high_a), (share_b, low_b, high_b) = (
        (0.0, 0.0, 1.0)
        if not count
        else (hits / count, *binomtest(hits, count).proportion_ci(1 - alpha, method="wilson"))
        for hits, count in (a, b)
    )
    difference = share_b - share_a
    low = difference - math.hypot(share_b - low_b, high_a - share_a)
    return low, difference + math.hypot(high_b - share_b, share_a - low_a)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values of several tests, so that one of them errs in at most 5 % of all cases.

    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979; scipy has no function for it.

    Returns:
        Corrected values in the same order, each as large as before or larger, at most 1.
    """
    order = np.argsort(p_values, kind="stable")
    corrected = np.empty(len(p_values))
    steps = np.arange(len(p_values), 0, -1)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values)[order] * steps))
    values: list[float] = corrected.tolist()
    return values


def rounds_needed(deviation: float, threshold: float, tests: int) -> int | None:
    """Compute how many rounds show a difference four times out of five, by the power of the t-test.

    Args:
        deviation: Standard deviation by `scatter`.
        threshold: Relative difference to be shown, such as 0.05.
        tests: Figures that are looked at together.

    Returns:
        The fewest rounds; None for more than `MOST_ROUNDS`.
    """
    from scipy.stats import nct, t

    shift = math.log1p(threshold) / max(deviation, 1e-9)

    def shows(rounds: int) -> bool:
        free = rounds - 2 * int(_TRIM * rounds) - 1
        power = nct.sf(t.ppf(1 - ALPHA / 2 / max(1, tests), free), free, math.sqrt(rounds) * shift)
        # Where it is as good as certain, scipy gives no number.
        return bool(np.isnan(power) or power >= _POWER)

    counts = range(LEAST_ROUNDS, MOST_ROUNDS + 1)
    first = bisect_left(counts, x=True, key=shows)
    return counts[first] if first < len(counts) else None
