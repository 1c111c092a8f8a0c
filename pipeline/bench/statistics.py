"""Percentiles of latencies, with 95 % intervals that say how far to trust them."""

from __future__ import annotations

from collections.abc import Sequence
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


def percentiles(values: Sequence[float] | Values) -> dict[int, float]:
    """Compute `PERCENTILES`, interpolated between neighbours as numpy and AIPerf do.

    Args:
        values: One or more.
    """
    found = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return dict(zip(PERCENTILES, found.tolist(), strict=True))


def percentile_intervals(values: Sequence[float] | Values) -> dict[int, Interval | None]:
    """Compute 95 % intervals of percentiles of independent values, whatever their distribution.

    They are intervals between order statistics, from the binomial distribution (`scipy.stats.quantile_test`).

    Args:
        values: One for each request.

    Returns:
        Percentile -> interval; None where there are too few values for an interval with both ends.
    """
    from scipy.stats import quantile_test

    sample = np.asarray(values, np.float64)
    found: dict[int, Interval | None] = {}
    for percent in PERCENTILES:
        test: Any = quantile_test(sample, q=0.0, p=percent / 100)
        low, high = test.confidence_interval(CONFIDENCE)
        found[percent] = (float(low), float(high)) if np.isfinite(low) and np.isfinite(high) else None
    return found


def pooled_intervals(groups: Sequence[Sequence[float] | Values], seed: int = 0) -> dict[int, Interval | None]:
    """Compute 95 % intervals of percentiles over values that come in groups, such as the gaps of each answer.

    Gaps of one answer are alike, so counting each as a witness of its own would promise too much. Whole answers are
    drawn anew (a cluster bootstrap), as histograms with bins of 2 %. Of many answers, those that follow each other are
    drawn together.

    Args:
        groups: The values of each request, in milliseconds.
        seed: Of the draws.

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
    chance = np.random.default_rng(seed)
    drawn = chance.multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES) @ counts
    reached = np.cumsum(drawn, axis=1)
    tail = (1 - CONFIDENCE) / 2
    found: dict[int, Interval | None] = {}
    for percent in PERCENTILES:
        rank = reached[:, -1:] * (percent / 100)
        bins = np.minimum((reached < rank).sum(axis=1), len(edges) - 1)
        low, high = np.quantile(edges[np.maximum(bins - 1, 0)], tail), np.quantile(edges[bins], 1 - tail)
        found[percent] = (float(low), float(high))
    return found


def histogram(values: Sequence[float] | Values, bins: int = 60) -> tuple[list[float], list[int]]:
    """Count values in bins whose widths grow evenly on a logarithmic scale.

    Args:
        values: Above 0.
        bins: How many.

    Returns:
        The `bins + 1` edges, and the counts.
    """
    sample = np.maximum(np.asarray(values, np.float64), 1e-6)
    low, high = float(sample.min()), float(sample.max())
    counts, edges = np.histogram(sample, np.geomspace(low, max(high, low * 1.01), bins + 1))
    return edges.tolist(), counts.tolist()
