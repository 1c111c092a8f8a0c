"""From a recipe and a few choices to a report: the search, the rounds at the end, the recommendation.

with open_study(store, recipe.name, question(…), space, objectives, seed=0) as study:
    search(study, runner, options, watch)
    report = conclude(study, recipe, options, pairs=3, runner=runner, say=print)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from pipeline.bench.run import BenchOptions
from pipeline.recipe import Recipe
from pipeline.bench.tune.confirmation import Round, confirm, rounds
from pipeline.bench.tune.report import (
    Recommendation,
    TuneReport,
    best_of,
    make_report,
    recommend,
    recommend_length,
)
from pipeline.bench.tune.search import Runner, SearchOptions, trial_name
from pipeline.bench.tune.search_space import SearchSpace, Settings
from pipeline.bench.tune.study import TrialRecord, TuneStudy


def question(recipe: Recipe, options: SearchOptions, bench: BenchOptions, machine: str) -> dict[str, Any]:
    """All that the figures of a search depend on besides its space: another question is another search.

    Args:
        recipe: As it is.
        options: Of the search; the number of trials is no part, so that a search can be prolonged.
        bench: How trials are measured.
        machine: That they run on.
    """
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"cache"}),
        "loads": [str(load) for load in options.loads],
        "bench": {one.name: str(getattr(bench, one.name)) for one in fields(bench) if one.name != "loads"},
        "machine": machine,
    }


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
        study: With its trials.
        recipe: As it is.
        options: Of the search.
        pairs: Pairs of interleaved rounds; 0 for none.
        runner: Serves settings; None where another machine measures.
        say: Told what is done.
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
    """The rounds in which the best trial is measured again.

    In a sweep over draft lengths, the best length is held against no draft; else the best trial against the recipe.

    Returns:
        None where there is nothing to hold against each other.
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
    study: TuneStudy, records: Sequence[TrialRecord], pairs: int, confirmed: Any
) -> Recommendation:
    (dimension,) = study.space.dimensions
    found = {
        length: one
        for one in records
        if one.feasible and isinstance(length := one.settings[dimension.key], int)
    }
    best = best_of([one for length, one in found.items() if length], study.objectives)
    result = None if best is None else study.measurement(trial_name(best.number))
    levels = () if result is None or best is None else result.levels
    acceptance = next((one.acceptance for one in levels if best and str(one.load) == best.load), None)
    if confirmed is None and pairs and 0 in dimension.values and best is not None:
        reason = "the best length was not measured against no draft in rounds of their own"
        return Recommendation(verdict="none yet", trial=best.number, reason=reason)
    advice = recommend_length(found, confirmed, dimension.own, study.objectives, acceptance)
    if advice.trial is None:
        return advice
    settings = next(one.settings for one in records if one.number == advice.trial)
    return advice.model_copy(update={"changes": study.space.overrides(settings)})


def lengths_of(space: SearchSpace) -> tuple[Settings, ...]:
    """The settings of a sweep over draft lengths, in their order."""
    (dimension,) = space.dimensions
    return tuple({dimension.key: value} for value in dimension.values)
