"""The best trial against the recipe as it is in interleaved rounds, and the report.

A search picks the best of many measurements, and so one that was lucky. Its best trial is therefore measured again,
A B B A, each with a server of its own; other work of the machine meets both of each pair alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.bench.settings import Load
from pipeline.bench.tune.objective import Confirmation, Score, gain_of, score
from pipeline.bench.tune.report import (
    Recommendation,
    TuneReport,
    best_of,
    make_report,
    recommend,
    recommend_length,
)
from pipeline.bench.tune.search import Runner, SearchOptions, measure_loads, trial_name
from pipeline.bench.tune.search_space import Settings
from pipeline.bench.tune.study import TrialRecord, TuneStudy
from pipeline.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of one side.

    Attributes:
        name: Name of its figures in the study.
        side: The best settings, or those that they are held against.
        settings: Settings that are served.
    """

    name: str
    side: Literal["best", "other"]
    settings: Settings


def rounds(study: TuneStudy, best: Settings, other: Settings, pairs: int) -> list[Round]:
    """List the rounds of two settings in their order: B A, A B, B A, …

    Args:
        study: Study of the settings.
        best: Best settings of the search.
        other: Settings that they are held against.
        pairs: Measurements of each.
    """
    planned = []
    for number in range(1, pairs + 1):
        two: list[tuple[Literal["best", "other"], Settings]] = [("other", other), ("best", best)]
        for side, settings in two if number % 2 else reversed(two):
            name = f"round-{number}-{study.settings_digest(settings)[:8]}"
            planned.append(Round(name, side, settings))
    return planned


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
        planned: Rounds by `rounds`.
        loads: Loads, the largest first.
        runner: Serves settings; None where another machine measures.
        watch: Called with a line about each round.

    Returns:
        The rounds and the gain; None where some have no figures, and there is no runner.

    Raises:
        ServerError: One of them does not serve any more.
    """
    scores: dict[str, list[Score]] = {"best": [], "other": []}
    for number, one in enumerate(planned, 1):
        result = study.measurement(one.name)
        if result is None:
            if runner is None:
                return None
            what = "the best settings" if one.side == "best" else "what they are held against"
            watch(f"round {number} of {len(planned)}: {what}")
            with runner.serve(one.settings) as trial:
                result = measure_loads(trial, loads, study.objectives)[0]
            study.keep(one.name, result)
        scores[one.side].append(score(result.levels, study.objectives))
    best, other = tuple(scores["best"]), tuple(scores["other"])
    return Confirmation(best, other, gain_of(best, other, study.objectives[0]))


def conclude(
    study: TuneStudy,
    recipe: Recipe,
    options: SearchOptions,
    *,
    pairs: int,
    runner: Runner | None,
    say: Callable[[str], None],
) -> TuneReport:
    """Measure the best trial again beside what it is held against, and recommend.

    Args:
        study: Study with its trials.
        recipe: The recipe as it is.
        options: Options of the search.
        pairs: Pairs of interleaved rounds; 0 for none.
        runner: Serves settings; None where another machine measures.
        say: Called with a line about each round.
    """
    records = study.records()
    planned = final_rounds(study, options, pairs)
    confirmed = confirm(study, planned, options.loads, runner, say) if planned else None
    advice: Recommendation
    if options.sweep:
        advice = _advice_on_length(study, records, pairs, confirmed)
    else:
        advice = recommend(records, study.space, study.objectives, confirmed)
    return make_report(study, recipe, advice, options.loads)


def final_rounds(study: TuneStudy, options: SearchOptions, pairs: int) -> list[Round]:
    """List the rounds in which the best trial is measured again; none where there is nothing to hold it against.

    In a sweep over draft lengths, the best length is held against no draft; else the best trial against the recipe.
    """
    records = study.records()
    if options.sweep:
        (dimension,) = study.space.dimensions
        best = best_of([one for one in records if one.settings[dimension.key]], study.objectives)
        other: Settings = {dimension.key: 0}
        comparable = best is not None and 0 in dimension.values
    else:
        best, other = best_of(records, study.objectives), study.space.own
        comparable = best is not None and bool(study.space.overrides(best.settings))
    return rounds(study, best.settings, other, pairs) if best is not None and comparable and pairs else []


def _advice_on_length(
    study: TuneStudy, records: Sequence[TrialRecord], pairs: int, confirmed: Confirmation | None
) -> Recommendation:
    (dimension,) = study.space.dimensions
    lengths = {
        length: one
        for one in records
        if one.feasible and isinstance(length := one.settings[dimension.key], int)
    }
    best = best_of([one for length, one in lengths.items() if length], study.objectives)
    result = None if best is None else study.measurement(trial_name(best.number))
    levels = () if result is None or best is None else result.levels
    acceptance = next((one.acceptance for one in levels if best and str(one.load) == best.load), None)
    if confirmed is None and pairs and 0 in dimension.values and best is not None:
        reason = "the best length was not measured against no draft in rounds of their own"
        return Recommendation(verdict="none yet", trial=best.number, reason=reason)
    advice = recommend_length(lengths, confirmed, dimension.own, study.objectives, acceptance)
    if advice.trial is None:
        return advice
    settings = next(one.settings for one in records if one.number == advice.trial)
    return advice.model_copy(update={"changes": study.space.overrides(settings)})
