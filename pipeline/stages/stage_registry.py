"""From a step of the plan to a call of its stage: which part of the recipe each stage gets.

The stages themselves know neither the store nor the plan; each is a function from folders to a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.golden import write_document
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import DRAFT, UNIFIED, Step, evaluated_exports, rank_exports
from pipeline.plan.preflight import Finding, manifest_findings
from pipeline.prepare import Prepared
from pipeline.progress import Progress
from pipeline.recipe import Gate, Quantization, Recipe
from pipeline.runtimes import EngineBuildRequest, Engines, ExecutorChoice, runtime_of
from pipeline.stages.fetch import fetch
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage is given."""

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
    return fetch(work.prepared.sources[work.role], work.into, progress=work.progress)


def _dataset(work: StageInput) -> Facts:
    from pipeline.stages.dataset import freeze

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


def _calibrate(work: StageInput) -> Facts:
    from pipeline.stages.calibrate import calibrate

    return calibrate(
        work.inputs["checkpoint"],
        work.inputs["dataset"],
        work.quantization,
        exports=rank_exports(work.recipe, work.role),
        into=work.into,
        progress=work.progress,
    )


def _convert(work: StageInput) -> Facts:
    from pipeline.runtimes.tensorrt.checkpoint import convert

    return convert(
        work.inputs["checkpoint"], parallelism(work.recipe, work.role), into=work.into, progress=work.progress
    )


def _evaluate(work: StageInput) -> Facts:
    from pipeline.stages.evaluate import Export, evaluate

    return evaluate(
        work.inputs["checkpoint"],
        [
            Export(work.inputs["calibrated"] / one.folder, one.kv_scale)
            for one in evaluated_exports(work.recipe)
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
        target=work.inputs["target"], draft=work.inputs.get("draft"), tokenizer=work.inputs["tokenizer"]
    )
    facts = runtime_of(work.recipe).package(work.recipe, engines, work.into, work.progress)
    # As they are in the step's key, whatever has become of their file since.
    if (golden := work.step.key.settings.get("golden")) is not None:
        write_document(golden, work.into)
    return {**facts, **manifest_findings(work.findings)}


STAGES: Mapping[str, Callable[[StageInput], Facts]] = {
    "fetch": _fetch,
    "dataset": _dataset,
    "calibrate": _calibrate,
    "convert": _convert,
    "evaluate": _evaluate,
    "build": _build,
    "package": _package,
}
