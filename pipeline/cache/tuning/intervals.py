"""How sure a counted share is: Wilson's score interval (E. B. Wilson, 1927), which holds for few counts, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many.

    >>> share = Share(0, 150)
    >>> f"{share.value:.3f} ({share.low():.3f} to {share.high():.3f})"
    '0.000 (0.000 to 0.025)'
    """

    count: int
    of: int

    @property
    def value(self) -> float:
        """0 of nothing is 0."""
        return self.count / self.of if self.of else 0.0

    def low(self, confidence: float = 0.95) -> float:
        """Lower end of the two-sided interval."""
        return self._interval(confidence)[0]

    def high(self, confidence: float = 0.95) -> float:
        """Upper end of the two-sided interval; 1 if nothing was counted."""
        return self._interval(confidence)[1]

    def _interval(self, confidence: float) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        z2 = _z(confidence) ** 2
        middle = self.value + z2 / (2 * self.of)
        spread = math.sqrt(z2 * (self.value * (1 - self.value) + z2 / (4 * self.of)) / self.of)
        scale = 1 + z2 / self.of
        low, high = (middle - spread) / scale, (middle + spread) / scale
        return (0.0 if self.count == 0 else low), (1.0 if self.count == self.of else high)


def needed(budget: float, confidence: float = 0.95) -> int:
    """How many traps, none of them served, put the upper end at the budget.

    >>> needed(0.01)
    381
    """
    return math.ceil(_z(confidence) ** 2 * (1 - budget) / budget)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)
