"""Trials and their scores: the objectives, how far a trial is from the recipe's SLO, and gains over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from pipeline.bench.result import MAX_FAILED, LevelResult, Section
from pipeline.bench.statistics import ALPHA, Ratio, trimmed_mean
from pipeline.bench.tune.search_space import Value
from pipeline.bench.tune.settings import Objective

# planned    has no figures yet
# measured   all its loads, or those that were needed
# refused    by the recipe's rules, preflight or the plan's memory: nothing was built
# stopped    early, because it broke the SLO by far or at a load that most hold, or was behind the best
# failed     was built, and did not serve
Outcome = Literal["planned", "measured", "refused", "stopped", "failed"]
COUNTED: frozenset[Outcome] = frozenset({"measured", "stopped", "failed"})

UNITS: Mapping[Objective, str] = {
    "goodput": "requests/s within the SLO",
    "throughput": "tokens/s",
    "latency": "ms per request (p95)",
}

_WORST = 1e9
_TINY = 1e-9  # in place of 0, which has no logarithm


class Score(Section):
    """Figures that a trial is judged by."""

    values: dict[Objective, float] = Field(
        default_factory=dict, description="Objective -> value; empty without figures."
    )
    violations: dict[str, float] = Field(
        default_factory=dict, description="Target -> share by which it was missed; 0 or less is within."
    )
    load: str = Field(default="", description="Load that the values belong to.")

    @property
    def feasible(self) -> bool:
        """Whether all targets were met."""
        return all(value <= 0 for value in self.violations.values())


class TrialRecord(Score):
    """One trial of a search."""

    number: int = Field(description="Trial number, from 0, which is the recipe as it is.")
    settings: dict[str, Value]
    outcome: Outcome = "planned"
    reason: str = Field(default="", description="Why it was refused or stopped, or has failed.")
    origin: str = Field(default="sampler", description="Why it was tried: recipe, forecast or sampler.")
    seconds: dict[str, float] = Field(default_factory=dict, description="build, serve, measure.")
    compiled: bool = Field(default=False, description="Whether an engine was built for it.")
    first_tokens_per_s: float | None = Field(
        default=None, description="Tokens a second in the first seconds of its last load, with any latency."
    )

    @property
    def feasible(self) -> bool:
        """Whether it was measured within the SLO."""
        return self.outcome == "measured" and super().feasible


def maximized(objective: Objective) -> bool:
    """Whether more of an objective is better."""
    return objective != "latency"


def figure(level: LevelResult, objective: Objective) -> float:
    """Value of an objective under one load."""
    match objective:
        case "goodput":
            return level.goodput_per_s or 0.0
        case "throughput":
            return level.output_tokens_per_s
        case "latency":
            total_ms = level.p95("total")
            return _WORST if total_ms is None else total_ms


def violations(level: LevelResult) -> dict[str, float]:
    """Measure how far a load is from each target of the SLO, and from answering nearly all requests."""
    missed = {
        check.target: 1.0 if check.measured is None else check.measured / check.wanted - 1
        for check in level.slo
    }
    return {**missed, "failed": level.failed_share - MAX_FAILED}


def score(levels: Sequence[LevelResult], objectives: Sequence[Objective]) -> Score:
    """Judge a trial by its loads.

    Throughput and goodput count at the load that brings most of them within the SLO, and at the one that misses it by
    least if all do. Latency counts at the largest load. The first objective decides which load counts.
    """
    if objectives[0] == "latency":
        decisive = max(levels, key=lambda level: level.value)
    elif within := [level for level in levels if level.holds()]:
        decisive = max(within, key=lambda level: figure(level, objectives[0]))
    else:
        decisive = min(
            levels, key=lambda level: sum(value for value in violations(level).values() if value > 0)
        )
    values = {objective: figure(decisive, objective) for objective in objectives}
    return Score(values=values, violations=violations(decisive), load=str(decisive.load))


def enough(levels: Sequence[LevelResult], objectives: Sequence[Objective]) -> bool:
    """Whether smaller loads can be left out: the largest counts anyway, or one holds, and smaller ones bring less."""
    return bool(levels) and (objectives[0] == "latency" or levels[-1].holds())


@dataclass(frozen=True, slots=True)
class ObjectiveGain:
    """Gain in the first objective, as a share: 0.1 is 10 % better.

    Attributes:
        mean: Mean over the pairs of rounds, without the outermost of many.
        interval: 95 % interval; None with fewer than three pairs.
        clear: Whether it is better beyond doubt.
    """

    mean: float
    interval: tuple[float, float] | None
    clear: bool


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Interleaved rounds of two settings.

    Attributes:
        gain: Gain of the best over the other.
    """

    best: tuple[Score, ...]
    other: tuple[Score, ...]
    gain: ObjectiveGain

    @property
    def best_feasible(self) -> bool:
        """Whether the best met the SLO in all rounds."""
        return all(score.feasible for score in self.best)

    @property
    def other_feasible(self) -> bool:
        """Whether the other met the SLO in all rounds."""
        return all(score.feasible for score in self.other)


def gain_of(best: Sequence[Score], other: Sequence[Score], objective: Objective) -> ObjectiveGain:
    """Compute the gain in an objective over pairs of rounds."""
    values = [[max(score.values[objective], _TINY) for score in scores] for scores in (best, other)]
    worse, better = reversed(values) if maximized(objective) else values
    rounds = list(zip(worse, better, strict=True))
    gain, ratio = trimmed_mean([b / a for a, b in rounds]) - 1, Ratio.of_rounds(rounds)
    if ratio is None:
        return ObjectiveGain(gain, None, clear=False)
    low, high = ratio.interval
    return ObjectiveGain(gain, (low - 1, high - 1), clear=ratio.p < ALPHA and gain > 0)
