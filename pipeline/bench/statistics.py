"""Percentiles of latencies with 95 % intervals, and the ratio of two deployments' figures over rounds. Pure.

A round gives one ratio B/A; what a machine does to both falls out of it. From the logarithms of the ratios come

    the ratio       their mean without the lowest and the highest fifth: a round in which the machine was busy with
                    something else does not decide
    the interval    a bootstrap over rounds, widened for few of them as Hesterberg does ("What Teachers Should Know
                    About the Bootstrap", 2015): a plain one promises too much
    the test        a t-test of the trimmed mean (Tukey and McLaughlin, 1963), corrected by Holm for all figures that
                    are looked at together: a package that is compared with itself is called worse in less than one
                    case of twenty, whatever figure it would be
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)
CONFIDENCE = 0.95

_RESAMPLES = 400
_CLUSTERS = 1000  # at most
_BINS_PER_DOUBLING = 32  # so that a bin is 2.2 % wide
_LEAST_MS, _DOUBLINGS = 0.01, 27  # bins from 0.01 ms to 22 minutes

Values = npt.NDArray[np.float64]
Interval = tuple[float, float]

ALPHA = 1 - CONFIDENCE
LEAST_ROUNDS, MOST_ROUNDS = 3, 400

_TRIM = 0.2  # of the rounds, at each end
_POWER = 0.8
_ROUND_RESAMPLES = 4000


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
    filled = [np.asarray(group, np.float64) for group in groups if len(group)]
    if len(filled) < 2:
        return dict.fromkeys(PERCENTILES)
    edges = _LEAST_MS * 2 ** (np.arange(_DOUBLINGS * _BINS_PER_DOUBLING + 1) / _BINS_PER_DOUBLING)
    clusters = min(len(filled), _CLUSTERS)
    counts = np.zeros((clusters, len(edges) + 1))
    for number, group in enumerate(filled):
        bins = np.searchsorted(edges, group)
        counts[number * clusters // len(filled)] += np.bincount(bins, minlength=len(edges) + 1)
    drawn = (
        np.random.default_rng(0).multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES)
        @ counts
    )
    reached = np.cumsum(drawn, axis=1)
    tail = (1 - CONFIDENCE) / 2
    intervals: dict[int, Interval | None] = {}
    for percent in PERCENTILES:
        rank = reached[:, -1:] * (percent / 100)
        bins = np.minimum((reached < rank).sum(axis=1), len(edges) - 1)
        low, high = np.quantile(edges[np.maximum(bins - 1, 0)], tail), np.quantile(edges[bins], 1 - tail)
        intervals[percent] = (float(low), float(high))
    return intervals


def histogram(values: Sequence[float] | Values, bins: int = 60) -> tuple[list[float], list[int]]:
    """Count values above 0 in bins of equal width on a logarithmic scale: the `bins + 1` edges, and the counts."""
    sample = np.maximum(np.asarray(values, np.float64), 1e-6)
    low, high = float(sample.min()), float(sample.max())
    counts, edges = np.histogram(sample, np.geomspace(low, max(high, low * 1.01), bins + 1))
    return edges.tolist(), counts.tolist()


@dataclass(frozen=True, slots=True)
class RoundRatio:
    """A figure of A and of B over several rounds.

    Attributes:
        a: Geometric mean of A, without the outermost rounds.
        b: Geometric mean of B, likewise.
        ratio: B/A: geometric mean of the ratios of the rounds, without the outermost.
        interval: 95 % interval of the ratio; None where too little was measured.
        p: Probability of such a ratio between equals; None with fewer than three rounds.
    """

    a: float
    b: float
    ratio: float
    interval: Interval | None
    p: float | None

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, float]]) -> RoundRatio:
        """Compute the ratio from the figures of A and B in each round, above 0."""
        logs = np.log(np.asarray(rounds, np.float64))
        ratios = logs[:, 1] - logs[:, 0]
        a, b, mean = (float(_trimmed(one)) for one in (logs[:, 0], logs[:, 1], ratios))
        if len(rounds) < LEAST_ROUNDS:
            return cls(math.exp(a), math.exp(b), math.exp(mean), None, None)
        scatter = _scatter(ratios)
        # Without any scatter there is nothing that a test could compute.
        p, interval = float(abs(mean) < 1e-9), (math.exp(mean), math.exp(mean))
        if scatter > 1e-9:
            from scipy.stats import t

            kept = len(ratios) - 2 * int(_TRIM * len(ratios))
            p = float(2 * t.sf(abs(mean) / scatter * math.sqrt(len(ratios)), kept - 1))
            interval = _bootstrap(ratios)
        return cls(math.exp(a), math.exp(b), math.exp(mean), interval, p)


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


def _bootstrap(ratios: Values) -> Interval:
    """Interval of the ratio, from the logarithms of each round's ratio."""
    from scipy.stats import bootstrap, norm, t

    rounds = len(ratios)
    # Hesterberg's expanded percentile interval: as wide as Student's t asks for where values are few.
    tail = norm.cdf(math.sqrt(rounds / (rounds - 1)) * t.ppf(ALPHA / 2, rounds - 1))
    resampled: Any = bootstrap(
        (ratios,),
        _trimmed,
        confidence_level=1 - 2 * tail,
        n_resamples=_ROUND_RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    return float(np.exp(resampled.confidence_interval.low)), float(np.exp(resampled.confidence_interval.high))


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
