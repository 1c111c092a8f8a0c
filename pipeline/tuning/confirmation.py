"""The best trial against the recipe as it is, in interleaved rounds: is it better, or was it luck?

A search picks the best of many measurements, and so one that was lucky. What it found is therefore measured again, A B
B A, each with a server of its own; what changes on the machine meanwhile falls out of each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.bench.arrivals import Load
from pipeline.bench.statistics import CONFIDENCE
from pipeline.tuning.objective import Objective, Score, maximized, score
from pipeline.tuning.search import Runner, measure_loads
from pipeline.tuning.search_space import Settings
from pipeline.tuning.study import TuneStudy


@dataclass(frozen=True, slots=True)
class ObjectiveGain:
    """How much better one is than the other in the first objective, as a share: 0.1 is 10 % better.

    Attributes:
        mean: Over the pairs of rounds (of their logarithms).
        interval: At 95 %; None with a single pair.
    """

    mean: float
    interval: tuple[float, float] | None

    @property
    def clear(self) -> bool:
        """Whether it is better beyond doubt."""
        return self.interval is not None and self.interval[0] > 0


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
    """Compute the gain of pairs of rounds, with Student's interval of the mean of their log-ratios.

    Args:
        best: Of each round.
        other: Of each round.
        objective: The first value of the scores.
    """
    sign = 1.0 if maximized(objective) else -1.0
    tiny = 1e-9
    ratios = [
        sign * math.log(max(one.values[0], tiny) / max(two.values[0], tiny))
        for one, two in zip(best, other, strict=True)
    ]
    mean = float(np.mean(ratios))
    if len(ratios) < 2:
        return ObjectiveGain(math.expm1(mean), None)
    from scipy.stats import t

    spread = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(ratios) - 1)) * spread
    return ObjectiveGain(math.expm1(mean), (math.expm1(mean - reach), math.expm1(mean + reach)))
