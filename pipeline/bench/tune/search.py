"""The loop of a search: the recipe as it is, the plan's guesses, then what Optuna proposes, until enough was measured.

    records = search(study, runner, SearchOptions(loads=(Load("concurrency", 16),)), watch)

What the plan refuses is never built and counts as no trial. Loads come from the largest down; the first seconds, and
after each load Optuna's pruner, say whether a trial is worth going on with.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from pipeline.bench.arrivals import Load
from pipeline.bench.result import BenchResult, LevelResult
from pipeline.errors import ServerError, StageError
from pipeline.bench.tune.objective import Objective, enough, figure, score, violations
from pipeline.bench.tune.search_space import Settings, Value
from pipeline.bench.tune.study import COUNTED, TrialRecord, TuneStudy

_FAR = 3.0  # times a target of the SLO, beyond which the first seconds end a trial
_MOST_REFUSED = 200  # in a row, before a search gives up
_DRAWN = 24  # combinations that the plan forecasts
_GUESSES = 2  # of them that are tried
_UNCOMPILED_SHARE = 0.5  # of the trials, at the beginning, that need no other engine


@dataclass(frozen=True, slots=True)
class TrialJudgement:
    """What the plan says of settings, before anything is built.

    Attributes:
        refusal: Why they are not tried; empty if they are.
        forecast: Tokens a second within the SLO; None where the plan has no forecast.
    """

    refusal: str = ""
    forecast: float | None = None


class ServedTrial(Protocol):
    """Settings that are being served.

    Attributes:
        seconds: `build` and `serve`.
        compiled: Whether an engine was built for them.
    """

    seconds: dict[str, float]
    compiled: bool

    def bench(self, load: Load, *, first_seconds: bool = False) -> BenchResult:
        """Put one load on it.

        Args:
            load: How much.
            first_seconds: Only look whether it is worth it.
        """


class Runner(Protocol):
    """Who plans, builds and serves settings."""

    def judge(self, settings: Settings) -> TrialJudgement:
        """Say what the plan thinks of settings; nothing is built."""

    def serve(self, settings: Settings) -> AbstractContextManager[ServedTrial]:
        """Build and serve settings within a block.

        Raises:
            ServerError: They do not serve.
            StageError: They cannot be built.
        """


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search is made.

    Attributes:
        loads: That a trial is measured with, the largest first.
        trials: That are measured; those that the plan refuses do not count.
        sweep: Settings that are tried, all of them and nothing else; empty to search.
        ahead: Trials are planned for another machine, and not measured here.
    """

    loads: tuple[Load, ...]
    trials: int = 12
    sweep: tuple[Settings, ...] = ()
    ahead: bool = False


# Told of each trial: when it begins (its outcome is `planned`), and when it ended.
Watch = Callable[[TrialRecord], None]


def search(study: TuneStudy, runner: Runner, options: SearchOptions, watch: Watch) -> list[TrialRecord]:
    """Run trials until as many as were asked for are measured, or nothing new is left.

    Args:
        study: Where they are kept; trials that it has are not run again.
        runner: Plans and measures them.
        options: How many, with which loads.
        watch: Told of each trial.

    Returns:
        All trials of the study.
    """
    for trial in plan_trials(study, runner, options):
        watch(trial)
        watch(_measured(study, runner, options, trial))
    return study.records()


def plan_trials(study: TuneStudy, runner: Runner, options: SearchOptions) -> TrialIterator:
    """Give the trials that are to be measured, one after the other; those without figures of an earlier search first.

    With `ahead`, the next one is given without the figures of those before.
    """
    return TrialIterator(study, runner, options)


class TrialIterator:
    """Iterates over trials that the plan lets pass. See `plan_trials`."""

    def __init__(self, study: TuneStudy, runner: Runner, options: SearchOptions) -> None:
        self._study, self._runner, self._options = study, runner, options
        self._left = list(study.planned())
        self._propose()

    def __iter__(self) -> TrialIterator:
        return self

    def __next__(self) -> TrialRecord:
        for _ in range(_MOST_REFUSED):
            trial = self._left.pop(0) if self._left else self._begin()
            if trial is None:
                break
            judged = self._runner.judge(trial.settings)
            if not judged.refusal:
                return trial
            self._study.finish(trial.number, "refused", reason=judged.refusal)
        raise StopIteration

    def _begin(self) -> TrialRecord | None:
        records = self._study.records()
        states = ("planned", *COUNTED) if self._options.ahead else tuple(COUNTED)
        count = sum(one.outcome in states for one in records)
        tried = sum(one.origin == "sweep" for one in records)
        if self._options.sweep:
            return self._study.next() if tried < len(self._options.sweep) else None
        if count >= self._options.trials:
            return None
        early = count < _UNCOMPILED_SHARE * self._options.trials
        return self._study.next(uncompiled=early, ahead=self._options.ahead)

    def _propose(self) -> None:
        if self._options.sweep:
            for settings in self._options.sweep:
                self._study.propose(settings, "sweep")
            return
        self._study.propose(self._study.space.own, "recipe")
        if not any(one.origin == "forecast" for one in self._study.records()):
            for settings in best_guesses(self._study, self._runner):
                self._study.propose(settings, "forecast")


def best_guesses(study: TuneStudy, runner: Runner) -> list[Settings]:
    """The settings that the plan forecasts the most tokens a second for, of some at random and the recipe's neighbours.

    Returns:
        The best; none where the plan has no forecast (`cpu`), or none better than the recipe's.
    """
    space = study.space
    own = runner.judge(space.own).forecast
    if own is None:
        return []
    chance = random.Random(f"{study.seed}/forecast")
    neighbours: list[dict[str, Value]] = [
        {**space.own, one.key: value} for one in space.dimensions for value in one.values if value != one.own
    ]
    drawn = [{one.key: chance.choice(one.values) for one in space.dimensions} for _ in range(_DRAWN)]
    found = [(runner.judge(settings), settings) for settings in (*neighbours, *drawn)]
    better = [
        (judged.forecast, settings)
        for judged, settings in found
        if not judged.refusal and judged.forecast is not None and judged.forecast > own
    ]
    better.sort(key=lambda one: -one[0])
    return [settings for _, settings in better[:_GUESSES]]


def trial_name(number: int) -> str:
    """What the figures of a trial are kept under."""
    return f"trial-{number:03d}"


def take_figures(study: TuneStudy, trial: TrialRecord, result: BenchResult) -> TrialRecord:
    """Finish a trial with figures that are there: of another machine, or of a process that was killed after it."""
    made = score(result.levels, study.objectives)
    return study.finish(trial.number, "measured", score=made)


def _measured(study: TuneStudy, runner: Runner, options: SearchOptions, trial: TrialRecord) -> TrialRecord:
    name = trial_name(trial.number)
    if (there := study.measurement(name)) is not None:
        return take_figures(study, trial, there)
    try:
        with runner.serve(trial.settings) as served:
            began = time.monotonic()
            result, stopped = measure_loads(
                served,
                options.loads,
                study.objectives,
                lambda step, worth, stoppable: study.is_behind(
                    trial.number, step, worth, stoppable=stoppable
                ),
            )
            seconds = {**served.seconds, "measure": time.monotonic() - began}
    except (ServerError, StageError) as error:
        return study.finish(trial.number, "failed", reason=str(error))
    scored = score(result.levels, study.objectives)
    if not stopped:
        study.keep(name, result)
    return study.finish(
        trial.number,
        "stopped" if stopped else "measured",
        score=scored,
        reason=stopped,
        seconds={part: round(value, 2) for part, value in seconds.items()},
        compiled=served.compiled,
    )


def measure_loads(
    served: ServedTrial,
    loads: Sequence[Load],
    objectives: Sequence[Objective],
    behind: Callable[[int, float, bool], bool] = lambda _step, _worth, _stoppable: False,
) -> tuple[BenchResult, str]:
    """Measure from the largest load down, as far as is needed to judge.

    Args:
        served: What is measured.
        loads: The largest first.
        objectives: Decide when it is enough.
        behind: Told how many loads were measured before, what this one is worth, and whether more would follow; says
            whether to give up.

    Returns:
        The figures, and why it was given up; empty if it was not.
    """
    results: list[BenchResult] = []
    for load in loads[:1] if objectives[0] == "latency" else loads:
        first = served.bench(load, first_seconds=True)
        if far := _far_off(first.levels[-1]):
            given_up = first, far
            continue
        results.append(served.bench(load))
        level = results[-1].levels[-1]
        if enough([level], objectives):
            behind(len(results) - 1, figure(level, objectives[0]), False)
            break
        # A load beyond the SLO is worth nothing, however many tokens it brings.
        if behind(len(results) - 1, 0.0, load != loads[-1]):
            return _joined(results), "it was behind most other trials"
    return (_joined(results), "") if results else given_up


def _joined(results: Sequence[BenchResult]) -> BenchResult:
    levels = sorted((level for one in results for level in one.levels), key=lambda level: level.value)
    return results[0].model_copy(update={"levels": tuple(levels)})


def _far_off(level: LevelResult) -> str:
    """Why the first seconds are enough to know that a load is hopeless; empty if it may be well."""
    missed = {name: value for name, value in violations(level).items() if name != "failed"}
    worst = max(missed, key=lambda name: missed[name], default="")
    if not worst or missed[worst] + 1 < _FAR:
        return ""
    return f"at {level.load} the first seconds had {missed[worst] + 1:.1f} times {worst}"
