"""How far the model is off, on published figures that its constants were fitted to and on those that they were not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.planning.performance.published import Figure, Kind, Use, computed, figures, fills_steps

KINDS: tuple[Kind, ...] = ("full-load", "fixed-batch", "first-token")
COVERAGE = 0.8  # share of held-out figures that an interval covers


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure, and what the model says."""

    figure: Figure
    computed: float

    @property
    def error(self) -> float:
        """Relative: -0.1 is ten percent too little."""
        return self.computed / self.figure.measured - 1

    @property
    def log_ratio(self) -> float:
        return math.log(self.computed / self.figure.measured)


def compared(use: Use, given: Mapping[str, Any] | None = None) -> tuple[Compared, ...]:
    """All figures of one use."""
    return tuple(Compared(figure, computed(figure, given)) for figure in figures(use))


def error_summary(use: Use, given: Mapping[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """Kind -> how far off; `throughput` is both kinds of it, `full-steps` those of full load whose steps prompts fill.

    Count; median and 90th percentile of the relative error; and the two ends of 80 percent of the ratios: `low` and
    `high` are measured over computed, what a computed figure is to be multiplied by.
    """
    everything = compared(use, given)
    found: dict[str, list[Compared]] = {
        kind: [one for one in everything if one.figure.kind == kind] for kind in KINDS
    }
    found["throughput"] = [one for one in everything if one.figure.kind != "first-token"]
    found["full-steps"] = [one for one in everything if fills_steps(one.figure)]
    return {name: summary(ones) for name, ones in found.items()}


def summary(ones: Sequence[Compared]) -> dict[str, float]:
    """Of some figures."""
    errors = sorted(abs(one.error) for one in ones)
    ratios = sorted(-one.log_ratio for one in ones)
    edge = (1 - COVERAGE) / 2
    return {
        "count": len(ones),
        "median": round(quantile(errors, 0.5), 3),
        "p90": round(quantile(errors, 0.9), 3),
        "low": round(math.exp(quantile(ratios, edge)), 3),
        "high": round(math.exp(quantile(ratios, 1 - edge)), 3),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, between neighbours in proportion."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
