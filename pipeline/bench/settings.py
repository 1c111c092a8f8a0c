"""The load that `bench`, `compare` and `tune` put on a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load.

    A closed loop (`concurrency`) keeps that many conversations under way; it slows down with the server, and so never
    shows what a queue does to people who come when they like. An open loop (`rate`, `trace`) sends at times that are
    fixed beforehand.

    Attributes:
        kind: `concurrency`: conversations at a time; `rate`: conversations that begin per second, at random times
            (Poisson); `trace`: at the times of the workload, `value` times as fast.
        value: See `kind`.
    """

    kind: Literal["concurrency", "rate", "trace"]
    value: float

    @property
    def open(self) -> bool:
        """Whether requests are sent without waiting for the answers to others."""
        return self.kind != "concurrency"

    @property
    def concurrency(self) -> int:
        """Conversations at a time in a closed loop."""
        return round(self.value)

    def __str__(self) -> str:
        match self.kind:
            case "concurrency":
                return f"{self.value:g} at a time"
            case "rate":
                return f"{self.value:g} a second"
            case _:
                return "a trace" if self.value == 1 else f"a trace, {self.value:g} times as fast"
