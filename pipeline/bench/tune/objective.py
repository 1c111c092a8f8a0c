"""From the figures of a trial's loads to what is optimized, and how far it is from the recipe's SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.bench.result import LevelResult
from pipeline.bench.sweep import MAX_FAILED, holds

Objective = Literal["goodput", "throughput", "latency"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
UNITS: Mapping[Objective, str] = {
    "goodput": "requests/s within the SLO",
    "throughput": "tokens/s",
    "latency": "ms per request (p95)",
}

_WORST = 1e9


@dataclass(frozen=True, slots=True)
class Score:
    """What a trial is worth.

    Attributes:
        values: One for each objective, in its unit.
        violations: Target -> how far it was missed, as a share of it; 0 or less is within.
        load: The load that the values are of.
    """

    values: tuple[float, ...]
    violations: Mapping[str, float]
    load: str

    @property
    def feasible(self) -> bool:
        """Whether all targets were met."""
        return all(value <= 0 for value in self.violations.values())


def maximized(objective: Objective) -> bool:
    """Whether more of it is better."""
    return objective != "latency"


def figure(level: LevelResult, objective: Objective) -> float:
    """What one load is worth."""
    match objective:
        case "goodput":
            return level.goodput_per_s or 0.0
        case "throughput":
            return level.output_tokens_per_s
        case "latency":
            total = level.latencies.get("total")
            return _WORST if total is None else total.p95


def violations(level: LevelResult) -> dict[str, float]:
    """How far a load is from each target of the SLO, and from answering nearly all requests."""
    found = {one.target: 1.0 if one.measured is None else one.measured / one.wanted - 1 for one in level.slo}
    return {**found, "failed": level.failed_share - MAX_FAILED}


def score(levels: Sequence[LevelResult], objectives: Sequence[Objective]) -> Score:
    """Judge a trial by its loads.

    Throughput and goodput count at the load that brings most of them within the SLO, and at the one that misses it by
    least if all do. Latency counts at the largest load, as people would have it.

    Args:
        levels: One or more.
        objectives: The first decides which load counts.
    """
    if objectives[0] == "latency":
        decisive = max(levels, key=lambda one: one.value)
    elif within := [one for one in levels if holds(one)]:
        decisive = max(within, key=lambda one: figure(one, objectives[0]))
    else:
        decisive = min(levels, key=lambda one: sum(value for value in violations(one).values() if value > 0))
    return Score(tuple(figure(decisive, one) for one in objectives), violations(decisive), str(decisive.load))


def enough(levels: Sequence[LevelResult], objectives: Sequence[Objective]) -> bool:
    """Whether smaller loads can be left out: the largest counts anyway, or one holds, and smaller ones bring less.

    Args:
        levels: Measured so far, the largest load first.
        objectives: As in `score`.
    """
    return bool(levels) and (objectives[0] == "latency" or holds(levels[-1]))
