"""A search from a recipe and its settings to a report, with trials that are built, served and measured over gRPC."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.bench.load_settings import Load, LoadSettings
from pipeline.bench.result import BenchResult
from pipeline.bench.run import run_bench
from pipeline.bench.subject import Subject
from pipeline.bench.tune.conclusion import conclude, write_tuned
from pipeline.bench.tune.handover import hand_over, take_results
from pipeline.bench.tune.objective import TrialRecord
from pipeline.bench.tune.report import TuneReport
from pipeline.bench.tune.search import SearchOptions, TrialJudgement, Watch, search
from pipeline.bench.tune.search_space import (
    SearchSpace,
    Settings,
    draft_lengths,
    fixed_values,
    lengths_of,
    search_space,
    variant,
)
from pipeline.bench.tune.settings import Objective, TuneSettings
from pipeline.bench.tune.study import open_study
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.machine.elsewhere import HandoverScript
from pipeline.machine.gpus import allowed_devices
from pipeline.prepare import prepare
from pipeline.prepare.report import make_report
from pipeline.progress import Progress, Silent
from pipeline.recipe import Recipe
from pipeline.recipe.catalog import sibling_file
from pipeline.runtimes import AUTO, ExecutorChoice
from pipeline.serving.served import ServedDeployment
from pipeline.stages import Builder, StepOutcome
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import SUPERVISED, RunningServer

_POLL_S, _ENDS_IN_S, _DRAINS_IN_S = 0.2, 5.0, 120.0
_SEEDS_APART = 1000  # between loads, so that no prompt is answered from another load's pages


@dataclass(slots=True)
class DeploymentRunner:
    """Serves variants of one recipe on this machine. See `search.Runner`.

    Attributes:
        store: Store where variants are built.
        load: How variants are measured; loads and seed are replaced by those of each call.
        first_seconds: Seconds that show whether a load is hopeless.
        allowed: Rules of preflight whose errors are let pass.
        devices: GPUs; empty for all that are needed.
    """

    recipe: Recipe
    space: SearchSpace
    store: Store
    load: LoadSettings
    first_seconds: float
    logs: Path
    progress: Progress
    executor: ExecutorChoice = AUTO
    allowed: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()

    def judge(self, settings: Settings) -> TrialJudgement:
        """See `search.Runner`."""
        try:
            changed = variant(self.recipe, self.space.overrides(settings))
            # The hub is asked once, for the recipe as it is.
            report = make_report(changed, self.store, offline=True, allowed=self.allowed)
        except InvalidInput as error:
            return TrialJudgement("; ".join(str(fault) for fault in error.faults))
        except UserError as error:
            return TrialJudgement(str(error))
        if report.refused:
            stopping = [finding.problem for finding in report.findings if finding.stops]
            return TrialJudgement("; ".join(stopping) or report.verdict)
        speed = report.performance
        if speed is None:
            return TrialJudgement()
        within = speed.within_slo if speed.has_slo else (speed.curve[-1] if speed.curve else None)
        return TrialJudgement(forecast=0.0 if within is None else within.tokens_per_s)

    def require_stopped(self) -> None:
        """Wait for the end of a server that belongs to a search that was killed.

        Raises:
            UserError: A deployment of this name runs, and would disturb every measurement.
        """
        name, began = self.recipe.name, time.monotonic()
        while (record := RunningServer.find(self.store.running, name, states=SUPERVISED)) is not None:
            waits_s = _DRAINS_IN_S if record.state == "draining" else _ENDS_IN_S
            if time.monotonic() - began > waits_s:
                raise UserError(
                    f"{name} is being served from this store, and trials would be measured beside it: "
                    f"pipeline stop {name}, or use another --store"
                )
            time.sleep(_POLL_S)

    @contextmanager
    def serve(self, settings: Settings) -> Iterator[DeployedTrial]:
        """See `search.Runner`."""
        self.require_stopped()
        changed = variant(self.recipe, self.space.overrides(settings))
        began = time.monotonic()
        package, compiled = self._build(changed)
        build_s = time.monotonic() - began
        deadline_s = Deployment.load(package).start_deadline_s
        argv = [
            *changed.argv,
            *self.store.argv,
            "--no-gateway",
            "--set",
            f"triton.start_timeout_s={deadline_s:g}",
        ]
        argv += [part for rule in sorted(self.allowed) for part in ("--allow", rule)]
        if self.devices:
            argv += ["--gpus", ",".join(map(str, self.devices))]
        shutil.rmtree(self.logs, ignore_errors=True)
        with self.progress.task("starting the server"):
            server = ServedDeployment.start(
                argv, changed.name, self.store.running, self.logs, deadline_s=deadline_s
            )
        try:
            seconds = {"build": build_s, "serve": server.start_s}
            yield DeployedTrial(self, changed, server, seconds, compiled)
        finally:
            server.stop()

    def _build(self, changed: Recipe) -> tuple[Path, bool]:
        """Build the package, and tell whether an engine was built for it."""
        outcomes: list[StepOutcome] = []
        with self.progress.task("building"):
            prepared = prepare(changed, self.store, allowed=self.allowed)
            prepared.check(self.store, self.executor)
            package = Builder(prepared, self.store, Silent(), self.executor, outcomes.append).run().path
        return package, any(outcome.made and outcome.step.stage == "build" for outcome in outcomes)


@dataclass(slots=True)
class DeployedTrial:
    """A variant that runs. See `search.RunningTrial`."""

    runner: DeploymentRunner
    recipe: Recipe
    server: ServedDeployment
    seconds: dict[str, float]
    compiled: bool
    _loads: dict[tuple[Load, bool], int] = field(default_factory=dict)

    def bench(self, load: Load, *, first_seconds: bool = False) -> BenchResult:
        """See `search.RunningTrial`."""
        subject = bench_subject(self.recipe, self.server.record)
        number = self._loads.setdefault((load, first_seconds), len(self._loads))
        settings = self.runner.load.at(load, seed=self.runner.load.seed + _SEEDS_APART * number)
        if first_seconds:
            first = {"duration_s": self.runner.first_seconds, "requests": None, "warmup_s": 0.0}
            settings = settings.model_copy(update=first)
        return run_bench(subject, settings, self.runner.progress)


def bench_subject(recipe: Recipe, record: RunningServer) -> Subject:
    """Make the subject of a trial: Triton itself, held against the recipe's SLO."""
    slo = recipe.slo if recipe.slo.model_dump(exclude_none=True) else None
    calibration = recipe.quantization.calibration
    dataset = None if calibration is None else calibration.dataset
    return replace(Subject.of_record(record, slo, "triton"), dataset=dataset)


FIRST_SECONDS = 4.0  # of a load that tell whether it is hopeless


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search before it begins."""

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
        output = named[0] if named else sibling_file(recipe, "tuned")
        if output.exists() and not settings.force and not may_exist:
            fix = "give --force to overwrite it, or name another file"
            faults.append(Fault("exists", key="--output", value=str(output), fix=fix))
        if faults or space is None:
            raise InvalidInput("pipeline tune", faults)
        judged = recipe.slo.ttft_p95_ms is not None or recipe.slo.itl_p95_ms is not None
        load = _usual_load(recipe, settings.load)
        options = SearchOptions(
            loads=tuple(sorted(load.loads, key=lambda level: -level.value)),
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
    """
    load = plan.load.model_dump(mode="json")
    return {
        "recipe": recipe.built_values(),
        "loads": [str(level) for level in plan.options.loads],
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
) -> TuneReport | HandoverScript:
    """Search, conclude, and write the tuned recipe if one is recommended.

    Args:
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
