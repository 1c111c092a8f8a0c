"""The end of a search: the best trial against the recipe as it is in interleaved rounds, the report, the tuned recipe.

A search picks the best of many measurements, and so one that was lucky. Its best trial is therefore measured again,
A B B A, each with a server of its own; other work of the machine meets both of each pair alike. The tuned recipe is the
recipe's own file with the recommended changes, and the evidence as comments.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.bench.load_settings import Load
from pipeline.bench.tune.objective import Confirmation, Score, TrialRecord, gain_of, score
from pipeline.bench.tune.report import (
    Recommendation,
    TrialReport,
    TuneReport,
    best_of,
    make_report,
    recommend,
    recommend_length,
)
from pipeline.bench.tune.search import Runner, SearchOptions, measure_loads, trial_name
from pipeline.bench.tune.search_space import Settings, Value, variant
from pipeline.bench.tune.study import TuneStudy
from pipeline.recipe import Recipe
from pipeline.recipe.catalog import annotated_yaml, write_recipe, written_values
from pipeline.recipe.sections import RecipeValues


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of one side.

    Attributes:
        name: Name of its figures in the study.
        side: The best settings, or those that they are compared with.
    """

    name: str
    side: Literal["best", "other"]
    settings: Settings


def rounds(study: TuneStudy, best: Settings, other: Settings, pairs: int) -> list[Round]:
    """List the rounds of two settings in their order: B A, A B, B A, …"""
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
        watch: Called with a line about each round.

    Raises:
        ServerError: One of them no longer serves.
    """
    scores: dict[str, list[Score]] = {"best": [], "other": []}
    for number, planned_round in enumerate(planned, 1):
        result = study.measurement(planned_round.name)
        if result is None:
            if runner is None:
                return None
            settings_name = (
                "the best settings" if planned_round.side == "best" else "what they are held against"
            )
            watch(f"round {number} of {len(planned)}: {settings_name}")
            with runner.serve(planned_round.settings) as trial:
                result = measure_loads(trial, loads, study.objectives)[0]
            study.keep(planned_round.name, result)
        scores[planned_round.side].append(score(result.levels, study.objectives))
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
    """Measure the best trial again beside its alternative, and recommend one of them."""
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
        best = best_of([record for record in records if record.settings[dimension.key]], study.objectives)
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
        length: record
        for record in records
        if record.feasible and isinstance(length := record.settings[dimension.key], int)
    }
    best = best_of([record for length, record in lengths.items() if length], study.objectives)
    result = None if best is None else study.measurement(trial_name(best.number))
    levels = () if result is None or best is None else result.levels
    acceptance = next((level.acceptance for level in levels if best and str(level.load) == best.load), None)
    if confirmed is None and pairs and 0 in dimension.values and best is not None:
        reason = "the best length was not measured against no draft in rounds of their own"
        return Recommendation(verdict="none yet", trial=best.number, reason=reason)
    advice = recommend_length(lengths, confirmed, dimension.own, study.objectives, acceptance)
    if advice.trial is None:
        return advice
    settings = next(record.settings for record in records if record.number == advice.trial)
    return advice.model_copy(update={"changes": study.space.overrides(settings)})


def tuned_recipe(recipe: Recipe, report: TuneReport, folder: Path) -> str:
    """Write the recipe with the recommended changes, and the evidence as comments.

    Args:
        folder: Folder of the tuned recipe; in that of the recipe, paths stay relative.
    """
    advice, own = report.recommendation, RecipeValues(recipe.model_dump(mode="json"))
    trial = next(trial for trial in report.trials if trial.number == advice.trial)
    reasons = {}
    for change in advice.changes:
        key = change.partition("=")[0]
        # Without drafts, their section is gone.
        named = next(
            (
                report_key
                for report_key in report.keys
                if report_key == key or report_key.startswith(f"{key}.")
            ),
            key,
        )
        reasons[key] = f"{report.reasons.get(named, '')} (was {_written(own[named])})"
    provenance, whole = recipe.provenance, variant(recipe, advice.changes).model_dump(mode="json")
    values = written_values(provenance, (*provenance.overrides, *advice.changes), whole, folder)
    return annotated_yaml(_head(recipe, report, trial), values, reasons)


def _written(value: Value) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _head(recipe: Recipe, report: TuneReport, trial: TrialReport) -> list[str]:
    command = shlex.join(("pipeline", "tune", *recipe.argv))
    advice, machine, at = report.recommendation, report.machine, trial.decisive
    lines = [
        f"{recipe.name}, tuned for {' and '.join(report.objectives)} by {command} on {report.made[:10]}.",
        f"Measured on {machine.get('system', 'a machine')} with {machine.get('processors', '?')} processors; "
        f"loads: {', '.join(report.workload['loads'])}; prompts: {report.workload.get('source', '?')}.",
        f"{len(report.trials)} trials; {advice.reason}.",
    ]
    if at is not None:
        figures = [f"{at.output_tokens_per_s:g} tokens/s"]
        figures += [f"TTFT p95 {at.ttft_p95_ms:g} ms"] if at.ttft_p95_ms is not None else []
        figures += [f"ITL p95 {at.itl_p95_ms:g} ms"] if at.itl_p95_ms is not None else []
        lines.append(f"Trial {trial.number}, {at.load}: {', '.join(figures)}.")
    lines.append(f"All figures: {report.folder}")
    return lines


def write_tuned(recipe: Recipe, report: TuneReport, file: Path, *, force: bool) -> TuneReport:
    """Write the tuned recipe.

    Raises:
        UserError: The file exists, or cannot be written.
    """
    text = tuned_recipe(recipe, report, file.absolute().parent)
    write_recipe(text, file, force=force)
    return report.model_copy(update={"tuned_recipe": str(file)})
