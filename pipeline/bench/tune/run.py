"""A search from a recipe and its settings to a report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bench.settings import Load, LoadSettings
from pipeline.bench.tune.conclusion import conclude
from pipeline.bench.tune.handover import HandedOverTrials, hand_over, take_results
from pipeline.bench.tune.report import TuneReport
from pipeline.bench.tune.runner import DeploymentRunner
from pipeline.bench.tune.search import SearchOptions, Watch, search
from pipeline.bench.tune.search_space import (
    SearchSpace,
    draft_lengths,
    fixed_values,
    lengths_of,
    search_space,
)
from pipeline.bench.tune.settings import Objective, TuneSettings
from pipeline.bench.tune.study import TrialRecord, open_study
from pipeline.bench.tune.tuned_recipe import tuned_file, write_tuned
from pipeline.errors import Fault, InvalidInput
from pipeline.machine.gpus import allowed_devices
from pipeline.progress import Progress
from pipeline.recipe import SERVED_SECTIONS, Recipe
from pipeline.runtimes import ExecutorChoice
from pipeline.store import Store

FIRST_SECONDS = 4.0  # of a load that tell whether it is hopeless


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search before it begins.

    Attributes:
        space: Keys and values that are tried.
        objectives: The first decides.
        load: How trials are measured.
        options: Trials and loads.
        rounds: Pairs of rounds at the end; 0 for none.
        output: File of the tuned recipe.
    """

    space: SearchSpace
    objectives: tuple[Objective, ...]
    load: LoadSettings
    options: SearchOptions
    rounds: int
    output: Path

    @classmethod
    def of(cls, recipe: Recipe, settings: TuneSettings, *, may_exist: bool = False) -> SearchPlan:
        """Plan the search of a recipe.

        Args:
            recipe: The recipe as it is, with the values that the study fixes.
            settings: Settings of the search.
            may_exist: Whether the tuned recipe's file may exist, because it will not be written.

        Raises:
            InvalidInput: Keys or lengths are wrong, or the file exists; lists everything that is wrong.
        """
        faults, space = list[Fault](), None
        study = settings.study
        try:
            if study.draft_lengths:
                space = draft_lengths(recipe, study.draft_lengths)
            else:
                space = search_space(recipe, study.keys, [key for key, _ in fixed_values(study.fix)])
        except InvalidInput as error:
            faults += error.faults
        named = settings.outputs(".yaml", ".yml")
        output = named[0] if named else tuned_file(recipe)
        if output.exists() and not settings.force and not may_exist:
            fix = "give --force to overwrite it, or name another file"
            faults.append(Fault("exists", key="--output", value=str(output), fix=fix))
        if faults or space is None:
            raise InvalidInput("pipeline tune", faults)
        judged = recipe.slo.ttft_p95_ms is not None or recipe.slo.itl_p95_ms is not None
        load = _usual_load(recipe, settings.load)
        options = SearchOptions(
            loads=tuple(sorted(load.loads, key=lambda one: -one.value)),
            trials=study.trials,
            sweep=lengths_of(space) if study.draft_lengths else (),
            ahead=settings.elsewhere,
        )
        usual: Objective = "goodput" if judged else "throughput"
        objectives = tuple(dict.fromkeys(study.objective)) or (usual,)
        return cls(space, objectives, load, options, study.rounds, output)


def _usual_load(recipe: Recipe, load: LoadSettings) -> LoadSettings:
    """Fill in the load: by default three levels up to the recipe's limit, with the questions it is calibrated for."""
    changes: dict[str, Any] = {}
    loads: tuple[Load, ...] = load.loads
    if not (load.concurrency or load.rate or load.trace):
        most = recipe.limits.max_concurrency
        loads = tuple(Load("concurrency", n) for n in sorted({most, max(1, most // 2), max(1, most // 4)}))
    random_words = load.prompts or load.prompt_tokens or load.trace or load.prefix_tokens
    if not random_words and recipe.quantization.calibration is not None:
        changes["prompts"] = "calibration"
    return load.at(*loads, **changes)


def question(recipe: Recipe, plan: SearchPlan, machine: str) -> dict[str, Any]:
    """List all that the figures of a search depend on besides its space: another question is another search.

    The number of trials is no part of it, so that a search can be prolonged.

    Args:
        recipe: The recipe as it is.
        plan: The search.
        machine: Machine that measures.
    """
    load = plan.load.model_dump(mode="json")
    return {
        "recipe": recipe.model_dump(mode="json", exclude=set(SERVED_SECTIONS)),
        "loads": [str(one) for one in plan.options.loads],
        "bench": load,
        "machine": machine,
    }


def tune(
    recipe: Recipe,
    store: Store,
    settings: TuneSettings,
    plan: SearchPlan,
    progress: Progress,
    *,
    allowed: frozenset[str] = frozenset(),
    begin: Callable[[Sequence[TrialRecord]], None],
    watch: Watch,
) -> TuneReport | HandedOverTrials:
    """Search, conclude, and write the tuned recipe if one is recommended.

    Args:
        recipe: The recipe as it is.
        store: Store of the study and of what is built.
        settings: Settings of the search.
        plan: The plan of these settings.
        progress: Reporter of what is done.
        allowed: Rules of preflight whose errors are let pass.
        begin: Called with the trials of an earlier run.
        watch: Called for each trial, when it begins and when it ended.

    Returns:
        The report; or a script for another machine, if trials are left that it is to measure.
    """
    machine = "another" if settings.elsewhere else platform.node()
    executor = ExecutorChoice("auto" if settings.elsewhere else settings.executor, devices=allowed_devices())
    with open_study(
        store,
        recipe.name,
        question(recipe, plan, machine),
        plan.space,
        plan.objectives,
        seed=plan.load.seed,
        restart=settings.study.restart,
    ) as study:
        runner = DeploymentRunner(
            recipe,
            plan.space,
            store,
            plan.load,
            FIRST_SECONDS,
            study.folder / "logs",
            progress,
            executor,
            allowed,
            allowed_devices(),
        )
        if settings.adopt is not None:
            taken = take_results(study, settings.adopt, recipe, plan.options, plan.rounds)
            progress.say(f"{recipe.name}: taken in: {', '.join(taken)}")
        if settings.executor == "print":
            script = hand_over(study, runner, recipe, plan.options, plan.load, plan.rounds)
            if script is not None:
                return script
        if not settings.elsewhere:
            runner.require_stopped()
            begin(study.records())
            search(study, runner, plan.options, watch)
        report = conclude(
            study,
            recipe,
            plan.options,
            pairs=plan.rounds,
            runner=None if settings.elsewhere else runner,
            say=progress.say,
        )
        if report.recommendation.verdict == "tuned":
            report = write_tuned(recipe, report, plan.output, force=settings.force)
        for file in (study.folder / "report.json", *settings.outputs(".json")):
            report.write(file)
        return report
