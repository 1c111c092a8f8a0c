"""Distribution of lengths in tokens, for prompts and answers of a load."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of lengths in tokens: normal, cut at one token; or even between two bounds.

    >>> Lengths.parse("512"), Lengths.parse("512~64").spread, Lengths.parse("100-800").high
    (Lengths(512), 64.0, 800)
    """

    mean: float
    spread: float = 0.0  # standard deviation
    low: int | None = None
    high: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `N`, `MEAN~DEVIATION` or `LOW-HIGH`.

        Raises:
            ValueError: The text has another form, or allows lengths below 1; the message says what is expected.
        """
        if even := re.fullmatch(r"(\d+)-(\d+)", text):
            low, high = int(even[1]), int(even[2])
            if 1 <= low <= high:
                return cls((low + high) / 2, low=low, high=high)
        elif (normal := re.fullmatch(r"(\d+)(?:~(\d+(?:\.\d+)?))?", text)) and int(normal[1]) >= 1:
            return cls(int(normal[1]), float(normal[2] or 0))
        raise ValueError(f"{text!r} is not a length in tokens: write N, MEAN~DEVIATION or LOW-HIGH")

    def draw(self, rng: random.Random, most: int) -> int:
        """Draw a length from 1 to `most`."""
        if self.low is not None and self.high is not None:
            return min(most, rng.randint(self.low, self.high))
        return max(1, min(most, round(rng.gauss(self.mean, self.spread))))

    def __repr__(self) -> str:
        if self.low is not None:
            return f"Lengths({self.low}-{self.high})"
        return f"Lengths({self.mean:g}~{self.spread:g})" if self.spread else f"Lengths({self.mean:g})"

    def __str__(self) -> str:
        return repr(self)[len("Lengths(") : -1]
