"""One trial for real: planned, built, served by `pipeline serve` as a process of its own, and measured over gRPC."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.bench.result import BenchResult
from pipeline.bench.run import run_bench
from pipeline.bench.settings import Load, LoadSettings
from pipeline.bench.subject import Subject
from pipeline.bench.tune.search import TrialJudgement
from pipeline.bench.tune.search_space import SearchSpace, Settings, variant
from pipeline.errors import InvalidInput, UserError
from pipeline.prepare import prepare
from pipeline.prepare.report import make_report
from pipeline.progress import Progress, Silent
from pipeline.recipe import Recipe
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
        recipe: The recipe as it is.
        space: Search space of the settings.
        store: Store where variants are built.
        load: How variants are measured; loads and seed are replaced by those of each call.
        first_seconds: Seconds that show whether a load is hopeless.
        logs: Folder for the output of servers.
        progress: Reporter of what is done.
        executor: Executor that builds engines.
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
            stopping = [one.problem for one in report.findings if one.stops]
            return TrialJudgement("; ".join(stopping) or report.verdict)
        speed = report.performance
        if speed is None:
            return TrialJudgement()
        within = speed.within_slo if speed.has_slo else (speed.curve[-1] if speed.curve else None)
        return TrialJudgement(forecast=0.0 if within is None else within.tokens_per_s)

    def require_stopped(self) -> None:
        """Wait for the end of a server that belongs to a search that was killed.

        Raises:
            UserError: A deployment of this name runs, beside which every trial would be measured.
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
            *changed.words,
            *self.store.words,
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
        return package, any(one.made and one.step.stage == "build" for one in outcomes)


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
