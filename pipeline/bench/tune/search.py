"""The loop of a search: the recipe as it is, the plan's guesses, then the model's proposals, until enough was measured.

    records = search(study, runner, SearchOptions(loads=(Load("concurrency", 16),)), watch)

Settings that the plan refuses are never built and count as no trial. Loads are measured from the largest down; the
first seconds of each tell whether a trial is worth going on with. One that is not counts by the time that it took.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult, LevelResult
from pipeline.bench.tune.objective import TrialRecord, enough, score, violations
from pipeline.bench.tune.race import spent
from pipeline.bench.tune.search_space import Settings, Value
from pipeline.bench.tune.settings import Objective
from pipeline.bench.tune.study import TuneStudy
from pipeline.errors import ServerError, StageError

_FAR = 3.0  # times a target of the SLO, beyond which the first seconds end a trial
_MOST_REFUSED = 200  # in a row, before a search gives up
_DRAWN = 24  # combinations that the plan forecasts
_GUESSES = 2  # of them that are tried
LEAST_LEFT = 0.5  # of a trial, for which another one is begun
_UNCOMPILED_SHARE = 0.5  # of the trials, at the beginning, that need no other engine


@dataclass(frozen=True, slots=True)
class TrialJudgement:
    """Judgement of the plan on settings, before anything is built.

    Attributes:
        refusal: Why they are not tried; empty if they are.
        forecast: Tokens a second within the SLO; None where the plan has no forecast.
    """

    refusal: str = ""
    forecast: float | None = None


class RunningTrial(Protocol):
    """A server with the settings of a trial.

    Attributes:
        seconds: Seconds of `build` and `serve`.
        compiled: Whether an engine was built for it.
    """

    seconds: dict[str, float]
    compiled: bool

    def bench(self, load: Load, *, first_seconds: bool = False) -> BenchResult:
        """Put one load on the server; with `first_seconds` only to see whether the trial is hopeless."""


class Runner(Protocol):
    """Plans, builds and serves settings."""

    def judge(self, settings: Settings) -> TrialJudgement:
        """Ask the plan about settings; nothing is built."""

    def serve(self, settings: Settings) -> AbstractContextManager[RunningTrial]:
        """Build and serve settings within a block.

        Raises:
            ServerError: They do not serve.
            StageError: They cannot be built.
        """


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Extent of a search.

    Attributes:
        loads: Loads of a trial, the largest first.
        trials: Whole trials whose time the search takes; those that the plan refuses do not count.
        ahead: Whether trials are planned for another machine, and not measured here.
    """

    loads: tuple[Load, ...]
    trials: int = 12
    ahead: bool = False


# Called for each trial: when it begins (its outcome is `planned`), and when it ended.
Watch = Callable[[TrialRecord], None]


def search(study: TuneStudy, runner: Runner, options: SearchOptions, watch: Watch) -> list[TrialRecord]:
    """Run trials until as many as were asked for are measured, or nothing new is left."""
    for trial in plan_trials(study, runner, options):
        watch(trial)
        watch(_measured(study, runner, options, trial))
    return study.records()


def plan_trials(study: TuneStudy, runner: Runner, options: SearchOptions) -> Iterator[TrialRecord]:
    """Yield the trials that are to be measured; those without figures of an earlier search first.

    With `ahead`, the next one is yielded without the figures of those before.
    """
    left, refused = list(study.planned()), 0
    forecasts = plan_forecasts(study, runner)
    _propose(study, forecasts)
    while refused < _MOST_REFUSED:
        trial = left.pop(0) if left else _begin(study, options, forecasts)
        if trial is None:
            return
        if refusal := runner.judge(trial.settings).refusal:
            study.finish(trial.number, "refused", reason=refusal)
            refused += 1
        else:
            refused = 0
            yield trial


def _begin(
    study: TuneStudy, options: SearchOptions, forecasts: Sequence[tuple[Settings, float]]
) -> TrialRecord | None:
    records = study.records()
    ahead = sum(record.outcome == "planned" for record in records) if options.ahead else 0
    count = spent(records) + ahead
    if count > options.trials - LEAST_LEFT:
        return None
    return study.next(forecasts, uncompiled=count < _UNCOMPILED_SHARE * options.trials)


def _propose(study: TuneStudy, forecasts: Sequence[tuple[Settings, float]]) -> None:
    study.propose(study.space.own, "recipe")
    own = forecasts[0][1] if forecasts else 0.0
    better = sorted(
        (forecast for forecast in forecasts if forecast[1] > own), key=lambda forecast: -forecast[1]
    )
    for settings, _ in better[:_GUESSES]:
        study.propose(settings, "forecast")


def plan_forecasts(study: TuneStudy, runner: Runner) -> list[tuple[Settings, float]]:
    """Forecast the recipe as it is, its neighbours, and some settings at random; without those that are refused.

    Returns:
        Settings and tokens a second, the recipe first; none where the plan has no forecast (`cpu`).
    """
    space = study.space
    if not runner.judge(space.own).forecast:
        return []
    rng = random.Random(f"{study.seed}/forecast")
    neighbours: list[dict[str, Value]] = [
        {**space.own, dimension.key: value}
        for dimension in space.dimensions
        for value in dimension.values
        if value != dimension.own
    ]
    drawn = [
        {dimension.key: rng.choice(dimension.values) for dimension in space.dimensions} for _ in range(_DRAWN)
    ]
    judged = [(settings, runner.judge(settings)) for settings in (space.own, *neighbours, *drawn)]
    return [
        (settings, judgement.forecast)
        for settings, judgement in judged
        if not judgement.refusal and judgement.forecast
    ]


def trial_name(number: int) -> str:
    """Name of a trial's figures in the study."""
    return f"trial-{number:03d}"


def take_figures(study: TuneStudy, trial: TrialRecord, result: BenchResult) -> TrialRecord:
    """Finish a trial with figures that another machine, or a process that was killed after it, has left."""
    return study.finish(trial.number, "measured", score=score(result.levels, study.objectives))


def _measured(study: TuneStudy, runner: Runner, options: SearchOptions, trial: TrialRecord) -> TrialRecord:
    name = trial_name(trial.number)
    if (measured := study.measurement(name)) is not None:
        return take_figures(study, trial, measured)
    try:
        with runner.serve(trial.settings) as running:
            began = time.monotonic()
            result, stopped = measure_loads(
                running,
                options.loads,
                study.objectives,
                lambda level: study.is_lost(trial.number, level.output_tokens_per_s),
                study.most_hold,
            )
            seconds = {**running.seconds, "measure": time.monotonic() - began}
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
        compiled=running.compiled,
    )


def measure_loads(
    trial: RunningTrial,
    loads: Sequence[Load],
    objectives: Sequence[Objective],
    is_lost: Callable[[LevelResult], bool] = lambda _: False,
    most_hold: Callable[[Sequence[Load]], bool] = lambda _: False,
) -> tuple[BenchResult, str]:
    """Measure from the largest load down, as far as is needed to judge.

    Args:
        is_lost: Tells from the first seconds of a load whether to give up.
        most_hold: Tells whether most other trials are within the SLO at one of these loads.

    Returns:
        The figures, and why it was given up; empty if it was not.
    """
    results: list[BenchResult] = []
    for load in loads[:1] if objectives[0] == "latency" else loads:
        first = trial.bench(load, first_seconds=True)
        if far := _far_off(first.levels[-1]):
            given_up = first, far
            continue
        # Smaller loads bring less, within the SLO or not.
        if is_lost(first.levels[-1]):
            return first, f"at {load} the first seconds were behind the best trial"
        results.append(trial.bench(load))
        if enough(results[-1].levels, objectives):
            break
        if load != loads[-1] and most_hold(loads[: loads.index(load) + 1]):
            return _joined(results), f"it missed the SLO at {load}, which most other trials held"
    return (_joined(results), "") if results else given_up


def _joined(results: Sequence[BenchResult]) -> BenchResult:
    levels = sorted((level for result in results for level in result.levels), key=lambda level: level.value)
    return results[0].model_copy(update={"levels": tuple(levels)})


def _far_off(level: LevelResult) -> str:
    """Reason why the first seconds show that a load is hopeless; empty if it may be well."""
    missed = {name: value for name, value in violations(level).items() if name != "failed"}
    worst = max(missed, key=lambda name: missed[name], default="")
    if not worst or missed[worst] + 1 < _FAR:
        return ""
    return f"at {level.load} the first seconds had {missed[worst] + 1:.1f} times {worst}"
