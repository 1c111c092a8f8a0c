"""A figure with how sure it is: the interval that covers 80 percent of the published figures held aside.

Only what such figures are of has an interval (`accuracy.unchecked`); of the rest nobody knows how far off it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.plan.performance.efficiency import fitted
from pipeline.store import Json

Quantity = Literal["throughput", "first-token"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Computed, and the ends within which four of five measurements would lie; None: nobody knows them."""

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float) -> Estimate:
        """All of it times a factor."""
        return self._with(lambda value: value * factor)

    def shortened(self) -> Estimate:
        """With four digits."""
        return self._with(short)

    def as_json(self) -> dict[str, Json]:
        """Plain values, short."""
        one = self.shortened()
        return {"value": one.value, "low": one.low, "high": one.high}

    def _with(self, change: Callable[[float], float]) -> Estimate:
        if self.low is None or self.high is None:
            return Estimate(change(self.value))
        return Estimate(change(self.value), change(self.low), change(self.high))


def rate(value: float, *, checked: bool) -> Estimate:
    """Of something that grows with throughput; `checked`: whether published figures are of the like."""
    low, high = _ends("throughput")
    return Estimate(value, value * low, value * high) if checked else Estimate(value)


def interval(value: float, *, checked: bool) -> Estimate:
    """Of a time between tokens, or a cost: what shrinks as throughput grows."""
    low, high = _ends("throughput")
    return Estimate(value, value / high, value / low) if checked else Estimate(value)


def first_token(value: float, *, checked: bool) -> Estimate:
    """Of a time to the first token on an idle engine."""
    low, high = _ends("first-token")
    return Estimate(value, value * low, value * high) if checked else Estimate(value)


def _ends(quantity: Quantity) -> tuple[float, float]:
    """Measured over computed. An interval always contains what was computed."""
    errors: Mapping[str, Mapping[str, float]] = fitted()["errors"]["held-out"]
    return min(errors[quantity]["low"], 1.0), max(errors[quantity]["high"], 1.0)


def short(value: float) -> float:
    """Four digits: more would pretend."""
    return float(f"{value:.4g}")
