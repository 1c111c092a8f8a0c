"""Executes a plan: takes what the store has, makes what it lacks, and stops at the gate.

Steps are demanded from the last one back, so a finished package needs none of its inputs, and a killed build goes on
where it was.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import SourceError, UserError
from pipeline.golden import write_document
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import DRAFT, UNIFIED, Step, evaluated_exports, rank_exports
from pipeline.plan.preflight import Finding, manifest_findings
from pipeline.prepare import Prepared, prepare
from pipeline.prepare.model_probe import probe_models
from pipeline.progress import Progress, Silent
from pipeline.recipe import Gate, Quantization, Recipe
from pipeline.runtimes import AUTO, EngineBuildRequest, Engines, ExecutorChoice, runtime_of
from pipeline.runtimes.tensorrt.executors.base import BuiltElsewhere
from pipeline.stages.evaluate.gate import hold_to_gate
from pipeline.stages.evaluate.results import Export
from pipeline.stages.fetch import fetch
from pipeline.store import Artifact, Json, Store
from pipeline.triton.deployment import Deployment

if TYPE_CHECKING:
    from pipeline.runtimes.tensorrt.executors.base import BuildJob


class HandedOver(Exception):
    """A build stopped because another machine makes the engines; not a failure."""

    def __init__(self, jobs: Sequence[tuple[Step, BuildJob]]) -> None:
        self.jobs = tuple(jobs)
        super().__init__(", ".join(step.name for step, _ in self.jobs))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of a build for one step."""

    step: Step
    artifact: Artifact
    made: bool  # False: it was in the store
    seconds: float


@dataclass(slots=True)
class Builder:
    """Executes one plan against one store.

    Attributes:
        executor: Who builds engines, for runtimes that compile them.
        on_outcome: Called once for each step that was found or made.
    """

    prepared: Prepared
    store: Store
    progress: Progress
    executor: ExecutorChoice = AUTO
    on_outcome: Callable[[StepOutcome], None] = lambda _: None
    _until: str = "package"
    _have: dict[str, Artifact] = field(default_factory=dict)

    def run(self, until: str = "package") -> Artifact:
        """Find or make the artifact of a step, and all that it is made from.

        Raises:
            GateFailed: The calibrated model is over the recipe's budget; nothing after `evaluate` was made.
            HandedOver: Engines are to be built on another machine; all before them is made.
            DamagedArtifact: An artifact of the store is not as it was published.
            InvalidInput: A checkpoint that was fetched, or this machine, does not fit the recipe.
            UserError: There is no such step.
        """
        self._until = until
        if until == "package" and "evaluate" in self.prepared.plan:
            self._realize("evaluate")  # a package from the store is held to today's budgets, too
        return self._realize(until)

    def finished(self) -> Artifact:
        """Find the finished package; nothing is made.

        Raises:
            UserError: It is not built.
            GateFailed: Its figures are over today's budgets.
        """
        plan, recipe = self.prepared.plan, self.prepared.recipe
        package = self.store.find(plan["package"].key)
        if package is None or not self.store.use(package):
            build = shlex.join(("pipeline", "build", *recipe.build_argv, *self.store.argv))
            raise UserError(
                f"{recipe.name} is not built, or its recipe has changed since; run {build}, or give --build"
            )
        evaluation = plan["evaluate"].key if "evaluate" in plan else None
        if evaluation is not None and (found := self.store.find(evaluation)) is not None:
            hold_to_gate(recipe, found, self.store, Silent())
        return package

    def _realize(self, name: str) -> Artifact:
        if name not in self._have:
            step = self.prepared.plan[name]
            found = self.store.find(step.key)
            if found is not None and self.store.use(found):
                self.store.check(found, self.progress)
                self._have[name] = found
                self.on_outcome(StepOutcome(step, found, made=False, seconds=0.0))
            else:
                self._have[name] = self._make(step)
            if step.stage == "evaluate":
                hold_to_gate(self.prepared.recipe, self._have[name], self.store, self.progress)
        return self._have[name]

    def _inputs(self, step: Step) -> dict[str, Path]:
        """Make all inputs, and return their folders; one that waits for another machine does not stop the others."""
        paths: dict[str, Path] = {}
        jobs: list[tuple[Step, BuildJob]] = []
        for role, source in step.inputs.items():
            try:
                paths[role] = self._realize(source).path
            except HandedOver as handed:
                jobs += handed.jobs
        if jobs:
            raise HandedOver(jobs)
        return paths

    def _make(self, step: Step) -> Artifact:
        inputs = self._inputs(step)
        self.progress.say(f"{step.name}: {_purpose(step)}")
        start = time.monotonic()

        def make(into: Path) -> Mapping[str, Json]:
            findings = self.prepared.check_fit(self.store, self.executor, self._until)
            work = StageInput(
                prepared=self.prepared,
                step=step,
                inputs=inputs,
                into=into,
                caches=self.store.caches,
                reports=self.store.reports,
                executor=self.executor,
                progress=self.progress,
                findings=findings,
            )
            return STAGES[step.stage](work)

        try:
            recipe = self.prepared.recipe.name
            artifact = self.store.obtain(step.key, make, recipe=recipe, progress=self.progress)
        except BuiltElsewhere as elsewhere:
            raise HandedOver([(step, elsewhere.job)]) from None
        self.on_outcome(StepOutcome(step, artifact, made=True, seconds=time.monotonic() - start))
        return artifact


_PURPOSES = {
    "fetch": "files from {source}",
    "dataset": "{samples} calibration samples and the held-out text, frozen to files",
    "sensitivity": "{formats} and what each costs each layer, with ModelOpt's AutoQuantize",
    "calibrate": "{format} scales with ModelOpt, and the exports",
    "convert": "TensorRT-LLM checkpoint, tensor parallel {tensor}, pipeline parallel {pipeline}",
    "evaluate": "{judged} against the original on held-out text",
    "build": "engine for the {runtime} runtime",
    "package": "Triton model repository",
}


def _purpose(step: Step) -> str:
    settings = step.key.settings
    judged: Any = settings.get("judged", [])
    formats: Any = settings.get("formats", [])
    values = {
        **settings,
        "source": settings.get("source", ""),
        "runtime": settings.get("runtime", ""),
        "judged": " and ".join(export["folder"] for export in judged),
        "formats": ", ".join(formats),
    }
    return _PURPOSES[step.stage].format_map(values)


# Placeholder of a package's folder that cannot be known before its sources are resolved.
UNKNOWN_PACKAGE = Path("/PACKAGE")


@dataclass(frozen=True, slots=True)
class DeploymentPreview:
    """Where the package of a recipe is or will be, and how it will be launched."""

    package: Path  # folder in the store, or UNKNOWN_PACKAGE
    deployment: Deployment | None  # of a package that is not made; None: deployment.json is there
    note: str = ""  # why the folder is not known


def preview_deployment(
    recipe: Recipe,
    store: Store,
    *,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
) -> DeploymentPreview:
    """Find the package of a recipe, or work out what its deployment.json will say. Nothing is made.

    Args:
        allowed: Ids of rules whose errors are let pass.

    Raises:
        InvalidInput: The recipe asks for what does not exist.
        UserError: Its model is not known, and neither the store nor the Hub has it.
        GateFailed: It is built, and its figures are over the recipe's budgets.
    """
    report, package, note = progress or Silent(), UNKNOWN_PACKAGE, ""
    try:
        prepared = prepare(recipe, store, progress=progress, allowed=allowed)
        key = prepared.plan["package"].key
        if store.find(key) is not None:
            return DeploymentPreview(Builder(prepared, store, report).finished().path, None)
        package = store.artifacts / key.name
    except SourceError as error:
        note = str(error)
    probes = probe_models(recipe, store)
    sizes = {role: probe.sizes for role, probe in probes.items() if probe.sizes is not None}
    return DeploymentPreview(package, runtime_of(recipe).preview_deployment(recipe, sizes), note)


@dataclass(frozen=True, slots=True)
class StageInput:
    """The input of a stage."""

    prepared: Prepared
    step: Step
    inputs: Mapping[str, Path]  # what the stage calls the input -> folder of the artifact
    into: Path  # an empty folder; for fetch, what a killed fetch left
    caches: Path  # of the store: what later runs may use and no artifact holds
    reports: Path  # of the store: what people may want to read later
    executor: ExecutorChoice  # who runs engine builders
    progress: Progress
    findings: tuple[Finding, ...] = ()  # of preflight: manifests of engines and packages keep warnings

    @property
    def recipe(self) -> Recipe:
        """The recipe of the plan."""
        return self.prepared.recipe

    @property
    def role(self) -> str:
        """ "target", "draft", or "" for what both share."""
        return self.step.name.partition(".")[2]

    @property
    def quantization(self) -> Quantization:
        """The settings for the checkpoint that is worked on: the draft has a format of its own."""
        chosen = self.recipe.quantization
        if self.role == DRAFT and self.recipe.draft is not None:
            chosen = chosen.model_copy(update={"format": self.recipe.draft.quantization})
        return chosen


Facts = Mapping[str, Json]


def _fetch(work: StageInput) -> Facts:
    return fetch(
        work.prepared.sources[work.role],
        work.into,
        progress=work.progress,
        allow_faults="source.weights" in work.prepared.allowed,
    )


def _dataset(work: StageInput) -> Facts:
    from pipeline.stages.dataset.freezing import freeze

    calibration = work.recipe.quantization.calibration
    assert calibration is not None, "a plan has a dataset only where something is calibrated"
    return freeze(
        calibration.dataset,
        work.inputs["checkpoint"],
        samples=calibration.samples,
        max_tokens=calibration.max_tokens,
        seed=calibration.seed,
        heldout_samples=(work.recipe.quantization.gate or Gate()).samples,
        into=work.into,
        progress=work.progress,
    )


def _sensitivity(work: StageInput) -> Facts:
    from pipeline.stages.calibrate.calibration import measure_sensitivity

    return measure_sensitivity(
        work.inputs["checkpoint"],
        work.inputs["dataset"],
        work.quantization,
        kept=work.caches / "sensitivity" / f"{work.step.key.digest}.pt",
        into=work.into,
        progress=work.progress,
    )


def _calibrate(work: StageInput) -> Facts:
    from pipeline.stages.calibrate.calibration import calibrate

    return calibrate(
        work.inputs["checkpoint"],
        work.inputs["dataset"],
        work.quantization,
        exports=rank_exports(work.recipe, work.role),
        into=work.into,
        progress=work.progress,
        sensitivity_dir=work.inputs.get("sensitivity"),
    )


def _convert(work: StageInput) -> Facts:
    from pipeline.runtimes.tensorrt.checkpoint import convert

    return convert(
        work.inputs["checkpoint"], parallelism(work.recipe, work.role), into=work.into, progress=work.progress
    )


def _evaluate(work: StageInput) -> Facts:
    from pipeline.stages.evaluate.comparison import evaluate

    return evaluate(
        work.inputs["checkpoint"],
        [
            Export(work.inputs["calibrated"] / export.folder, export.kv_scale, export.precision)
            for export in evaluated_exports(work.recipe)
        ],
        work.inputs["dataset"] / "heldout.jsonl",
        into=work.into,
        progress=work.progress,
    )


def _build(work: StageInput) -> Facts:
    checkpoint = work.inputs["checkpoint"]
    calibrated = checkpoint / UNIFIED
    order = EngineBuildRequest(
        recipe=work.recipe,
        role=work.role,
        checkpoint=calibrated if calibrated.is_dir() else checkpoint,
        ranks=_ranks(work),
        caches=work.caches,
        reports=work.reports,
        executor=work.executor,
        into=work.into,
        progress=work.progress,
    )
    return {**runtime_of(work.recipe).build(order), **manifest_findings(work.findings)}


def _ranks(work: StageInput) -> Path | None:
    """The TensorRT-LLM checkpoint: converted, or a part of the calibration's result."""
    if work.recipe.runtime.kind != "tensorrt":
        return None
    split = work.inputs.get("ranks", work.inputs["checkpoint"])
    return split / parallelism(work.recipe, work.role).folder


def _package(work: StageInput) -> Facts:
    engines = Engines(
        target=work.inputs["target"],
        draft=work.inputs.get("draft"),
        tokenizer=work.inputs["tokenizer"],
        adapters={name: work.inputs[f"adapter.{name}"] for name in work.recipe.adapters},
    )
    facts = runtime_of(work.recipe).package(work.recipe, engines, work.into, work.progress)
    # As they are in the step's key, whatever has become of their file since.
    if (golden := work.step.key.settings.get("golden")) is not None:
        write_document(golden, work.into)
    return {**facts, **manifest_findings(work.findings)}


STAGES: Mapping[str, Callable[[StageInput], Facts]] = {
    "fetch": _fetch,
    "dataset": _dataset,
    "sensitivity": _sensitivity,
    "calibrate": _calibrate,
    "convert": _convert,
    "evaluate": _evaluate,
    "build": _build,
    "package": _package,
}
