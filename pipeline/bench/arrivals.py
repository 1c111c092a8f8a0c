"""When requests are sent: closed loop, where clients wait for their answers, or open loop, where they do not.

A closed loop keeps so many conversations under way; it slows down with the server, and so never shows what a queue does
to people who come when they like. An open loop sends at times that are fixed beforehand. Its latencies are counted from
those times: a request that is sent late, because the generator was held up, was late for whoever waited for it
(otherwise "coordinated omission" hides the worst of a slow server).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load.

    Attributes:
        kind: `concurrency`: so many conversations at a time; `rate`: so many begin a second, at random times (Poisson);
            `trace`: at the times of the workload, `value` times as fast.
        value: See `kind`.
    """

    kind: Literal["concurrency", "rate", "trace"]
    value: float

    @property
    def open(self) -> bool:
        """Whether requests come whether or not others are answered."""
        return self.kind != "concurrency"

    @property
    def concurrency(self) -> int:
        """Conversations at a time, of a closed loop."""
        return round(self.value)

    def __str__(self) -> str:
        match self.kind:
            case "concurrency":
                return f"{self.value:g} at a time"
            case "rate":
                return f"{self.value:g} a second"
            case _:
                return "a trace" if self.value == 1 else f"a trace, {self.value:g} times as fast"


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Give the times of arrivals that know nothing of each other, in seconds since the start, without end.

    Args:
        rate: How many a second on average.
        seed: The same seed gives the same times.
    """
    chance, now = random.Random(seed), 0.0
    while True:
        now += chance.expovariate(rate)
        yield now
