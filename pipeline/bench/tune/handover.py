"""Trials that another machine measures: a script with all of their steps, and its figures back into the study.

The script builds, serves, measures and stops each trial with the commands that a person would type. It leaves one file
of `pipeline bench` for each trial, which `take_results` takes in; the next script has the rounds at the end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from pipeline.bench.load_settings import LoadSettings, section_argv
from pipeline.bench.result import BenchResult
from pipeline.bench.tune.conclusion import final_rounds
from pipeline.bench.tune.search import Runner, SearchOptions, plan_trials, take_figures, trial_name
from pipeline.bench.tune.search_space import Settings
from pipeline.bench.tune.study import TuneStudy
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.machine.elsewhere import HandoverScript, ReturnCommand
from pipeline.recipe import Recipe

_SLO_MISSED = 3  # exit code of `pipeline bench`, whose figures count all the same


def hand_over(
    study: TuneStudy, runner: Runner, recipe: Recipe, options: SearchOptions, load: LoadSettings, pairs: int
) -> HandoverScript | None:
    """Write the script of all trials that are to be measured, or of the rounds at the end once they are."""
    planned: list[tuple[str, Settings]] = [
        (trial_name(trial.number), trial.settings) for trial in plan_trials(study, runner, options)
    ]
    if not planned:
        planned = [
            (planned_round.name, planned_round.settings)
            for planned_round in final_rounds(study, options, pairs)
            if study.measurement(planned_round.name) is None
        ]
    if not planned:
        return None
    folder = f"{recipe.name}-tune"
    trials = []
    for name, settings in planned:
        sets = (word for change in study.space.overrides(settings) for word in ("--set", change))
        trials.append(shlex.join(["trial", name, *sets]))
    following = (ReturnCommand("pipeline tune … --adopt", folder, "$OUT"),)
    names = tuple(name for name, _ in planned)
    return HandoverScript(study.folder / "trials.sh", names, folder, following).write(
        __package__,
        "trials.sh.j2",
        recipe=recipe.built_values(),
        title=f"Trials of {recipe.name} for `pipeline tune`: each is built, served, measured and stopped.",
        done="The figures are in $OUT.",
        name=shlex.quote(recipe.name),
        load=shlex.join(section_argv("--load", load.at(*options.loads))),
        slo_missed=_SLO_MISSED,
        trials=trials,
    )


def take_results(
    study: TuneStudy, folder: Path, recipe: Recipe, options: SearchOptions, pairs: int
) -> tuple[str, ...]:
    """Take the figures that a script left into the study. Figures that it has already are left as they are.

    Args:
        study: Study that the script was written for.

    Returns:
        Names of the trials and rounds that were taken.

    Raises:
        UserError: The folder has nothing that the study waits for.
        InvalidInput: Lists every file that belongs to another search; nothing is taken then.
    """
    trials = {trial_name(trial.number): trial for trial in study.planned()}
    names = [*trials, *(planned_round.name for planned_round in final_rounds(study, options, pairs))]
    faults: list[Fault] = []
    results: dict[str, BenchResult] = {}
    for name in names:
        file = folder / f"{name}.json"
        if not file.is_file() or study.measurement(name) is not None:
            continue
        try:
            results[name] = BenchResult.read(file)
        except UserError as error:
            faults.append(Fault(str(error)))
            continue
        faults += _strange(results[name], file, recipe, options)
    if faults:
        raise InvalidInput(str(folder), faults)
    failed = {name: folder / f"{name}.failed" for name in trials if (folder / f"{name}.failed").is_file()}
    if not results and not failed:
        awaited = ", ".join(f"{name}.json" for name in names[:4]) or "none: all trials have their figures"
        raise UserError(f"{folder} has no figures that this search waits for ({awaited})")
    for name, result in results.items():
        study.keep(name, result)
        if name in trials:
            take_figures(study, trials[name], result)
    for name, file in failed.items():
        if name not in results:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            reason = lines[-1] if lines else "it did not serve"
            study.finish(trials[name].number, "failed", reason=reason)
    return (*results, *(name for name in failed if name not in results))


def _strange(result: BenchResult, file: Path, recipe: Recipe, options: SearchOptions) -> Iterator[Fault]:
    if result.name != recipe.name:
        yield Fault(f"is of {result.name}, not of {recipe.name}", key=file.name)
    wanted = {str(load) for load in options.loads}
    unexpected = [str(level.load) for level in result.levels if str(level.load) not in wanted]
    if unexpected or not result.levels:
        had = ", ".join(unexpected) or "no load"
        yield Fault(f"was measured with {had}, and the search has {', '.join(sorted(wanted))}", key=file.name)
