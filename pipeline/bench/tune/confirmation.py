"""The best trial against the recipe as it is, in interleaved rounds: is it better, or was it luck?

A search picks the best of many measurements, and so one that was lucky. What it found is therefore measured again, A B
B A, each with a server of its own; what changes on the machine meanwhile falls out of each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.bench.arrivals import Load
from pipeline.bench.ratios import ALPHA, RoundRatio
from pipeline.bench.tune.objective import Objective, Score, maximized, score
from pipeline.bench.tune.search import Runner, measure_loads
from pipeline.bench.tune.search_space import Settings
from pipeline.bench.tune.study import TuneStudy

_TINY = 1e-9  # in place of 0, which has no logarithm


@dataclass(frozen=True, slots=True)
class ObjectiveGain:
    """How much better one is than the other in the first objective, as a share: 0.1 is 10 % better.

    Attributes:
        mean: Over the pairs of rounds, without the outermost of many.
        interval: At 95 %; None with fewer than three pairs.
        clear: Whether it is better beyond doubt.
    """

    mean: float
    interval: tuple[float, float] | None
    clear: bool


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The rounds of two settings.

    Attributes:
        best: Scores of what the search found, in the order of the rounds.
        other: Scores of what it is held against.
        gain: Of the best over the other.
    """

    best: tuple[Score, ...]
    other: tuple[Score, ...]
    gain: ObjectiveGain

    @property
    def best_feasible(self) -> bool:
        """Whether the best met the SLO in all rounds."""
        return all(one.feasible for one in self.best)

    @property
    def other_feasible(self) -> bool:
        """Whether the other met the SLO in all rounds."""
        return all(one.feasible for one in self.other)


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of one side.

    Attributes:
        name: That its figures are kept under.
        side: What was found, or what it is held against.
        settings: That are served.
    """

    name: str
    side: Literal["best", "other"]
    settings: Settings


def rounds(study: TuneStudy, best: Settings, other: Settings, pairs: int) -> list[Round]:
    """List the rounds of two settings in their order: B A, A B, B A, …

    Args:
        study: That the settings are of.
        best: What the search found.
        other: What it is held against.
        pairs: How often each is measured.
    """
    found = []
    for number in range(1, pairs + 1):
        two: list[tuple[Literal["best", "other"], Settings]] = [("other", other), ("best", best)]
        for side, settings in two if number % 2 else reversed(two):
            name = f"round-{number}-{study.settings_digest(settings)[:8]}"
            found.append(Round(name, side, settings))
    return found


def confirm(
    study: TuneStudy,
    planned: Sequence[Round],
    loads: Sequence[Load],
    runner: Runner | None,
    watch: Callable[[str], None],
) -> Confirmation | None:
    """Measure two settings in interleaved rounds.

    Args:
        study: Keeps the figures; rounds that it has are not measured again.
        planned: What `rounds` listed.
        loads: The largest first.
        runner: Serves settings; None where another machine measures.
        watch: Told what is measured.

    Returns:
        The rounds and the gain; None where some have no figures, and there is no runner.

    Raises:
        ServerError: One of them does not serve any more.
    """
    found: dict[str, list[Score]] = {"best": [], "other": []}
    for number, one in enumerate(planned, 1):
        result = study.measurement(one.name)
        if result is None:
            if runner is None:
                return None
            what = "what was found" if one.side == "best" else "what it is held against"
            watch(f"round {number} of {len(planned)}: {what}")
            with runner.serve(one.settings) as served:
                result = measure_loads(served, loads, study.objectives)[0]
            study.keep(one.name, result)
        found[one.side].append(score(result.levels, study.objectives))
    best, other = tuple(found["best"]), tuple(found["other"])
    return Confirmation(best, other, gain_of(best, other, study.objectives[0]))


def gain_of(best: Sequence[Score], other: Sequence[Score], objective: Objective) -> ObjectiveGain:
    """Compute the gain of pairs of rounds.

    Args:
        best: Of each round.
        other: Of each round.
        objective: The first value of the scores.
    """
    values = [[max(score.values[0], _TINY) for score in scores] for scores in (best, other)]
    worse, better = reversed(values) if maximized(objective) else values
    found = RoundRatio.of(list(zip(worse, better, strict=True)))
    interval = None if found.interval is None else (found.interval[0] - 1, found.interval[1] - 1)
    clear = found.p is not None and found.p < ALPHA and found.ratio > 1
    return ObjectiveGain(found.ratio - 1, interval, clear)
