"""Logarithmic axes: where values lie between the ends, and which round numbers to mark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """From one value to another, both positive; a little room at the ends."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """That shows all of them."""
        low, high = min(values), max(values)
        room = max((high / low) ** 0.05, 1.1)
        return cls(low / room, high * room)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def marks(self) -> tuple[float, ...]:
        """1, 2 and 5 times powers of ten between the ends.

        >>> Axis(3, 120).marks()
        (5.0, 10.0, 20.0, 50.0, 100.0)
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = (step * 10.0**power for power in powers for step in (1, 2, 5))
        return tuple(float(f"{value:.6g}") for value in found if self.low <= value <= self.high)
