"""A figure with how sure it is: the interval that covers 80 percent of the published figures held aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.planning.performance.efficiency import fitted
from pipeline.store import Json

Quantity = Literal["throughput", "first-token"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Computed, and the ends within which four of five measurements would lie."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def shortened(self) -> Estimate:
        return Estimate(short(self.value), short(self.low), short(self.high))

    def as_json(self) -> dict[str, Json]:
        return {"value": short(self.value), "low": short(self.low), "high": short(self.high)}


def rate(value: float) -> Estimate:
    """Of something that grows with throughput."""
    low, high = _ends("throughput")
    return Estimate(value, value * low, value * high)


def interval(value: float) -> Estimate:
    """Of a time between tokens, or a cost: what shrinks as throughput grows."""
    low, high = _ends("throughput")
    return Estimate(value, value / high, value / low)


def first_token(value: float) -> Estimate:
    """Of a time to the first token."""
    low, high = _ends("first-token")
    return Estimate(value, value * low, value * high)


def _ends(quantity: Quantity) -> tuple[float, float]:
    """Measured over computed. An interval always contains what was computed."""
    errors: Mapping[str, Mapping[str, float]] = fitted()["errors"]["held-out"]
    return min(errors[quantity]["low"], 1.0), max(errors[quantity]["high"], 1.0)


def short(value: float) -> float:
    """Four digits: more would pretend."""
    return float(f"{value:.4g}")
