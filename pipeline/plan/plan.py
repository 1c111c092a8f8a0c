"""The plan: which artifacts a recipe needs, how each is named, and what it is made from.

A pure function of the recipe, its resolved sources and the versions of the tools. `build` executes this object and
`plan` prints it, so the two cannot disagree. Nothing is read from disk here and nothing is written.

    fetch.target ─┬─ dataset ─┬─ calibrate.target ─┬─ evaluate ─────┐
                  └───────────┘                    └─ build.target ─┼─ package
    fetch.draft ──────────────────────────────────── build.draft ───┤
    fetch.adapter.NAME ─────────────────────────────────────────────┘

With format `auto`, sensitivity.target lies between the dataset and calibrate.target: it does not depend on the budget.
Without quantization the checkpoint is built as it is: no dataset, no calibration, no gate. For `tensorrt` it is then
split for the ranks first (convert.target), which calibration does for a quantized one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from pipeline.contracts import llmapi
from pipeline.errors import UserError
from pipeline.plan.parallelism import Parallelism, parallelism
from pipeline.recipe import CpuRuntime, Gate, Recipe
from pipeline.recipe.runtime import Precision
from pipeline.store import ArtifactKey, Json

# Raised whenever a stage would make different files from the same inputs; it is part of every key.
REVISIONS = {
    "fetch": 1,
    "dataset": 1,
    "sensitivity": 1,
    "calibrate": 2,
    "convert": 2,
    "evaluate": 4,
    "build": 2,
    "package": 2,
}

TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True, slots=True)
class Step:
    """One artifact to be had: found in the store, or made by its stage."""

    name: str  # "fetch.target", "package", …
    stage: str  # "fetch"
    key: ArtifactKey
    inputs: Mapping[str, str]  # what the stage calls the input -> name of the step that makes it


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one build, inputs before their users."""

    recipe: Recipe
    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getitem__(self, name: str) -> Step:
        """Raises UserError: there is no such step."""
        for step in self.steps:
            if step.name == name:
                return step
        raise UserError(f"no step {name!r}; this build has {', '.join(step.name for step in self.steps)}")

    def __contains__(self, name: object) -> bool:
        return any(step.name == name for step in self.steps)


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Facts that a plan depends on besides the recipe; gathered by `pipeline.prepare.facts`."""

    sources: Mapping[
        str, Mapping[str, Json]
    ]  # role -> identity of the checkpoint (hub commit, or content digest)
    dataset: Mapping[str, Json]  # identity of the calibration set: name and digests of its files
    tools: Mapping[str, Mapping[str, str]]  # stage -> package -> version
    build: Mapping[
        str, Mapping[str, Json]
    ]  # role -> what the runtime's build depends on besides the checkpoint
    package: Mapping[str, Json]  # what the repository depends on: settings, digests of the model sources


def make_plan(recipe: Recipe, around: PlanFacts) -> Plan:
    """Plan the steps that turn a recipe into a Triton model repository."""
    return Plan(recipe, tuple(_Planner(recipe, around).steps()))


def rank_exports(recipe: Recipe, role: str) -> tuple[Parallelism, ...]:
    """List the sizes that a calibrated model is exported for as a TensorRT-LLM checkpoint.

    Of the draft, those of its engine; of the target, those of its engine, or tensor-parallel sizes that the recipe
    lists, among them the engine's own. `pytorch` reads the Hugging Face export and needs none, and neither does a draft
    on `cpu`.
    """
    own, kind = parallelism(recipe, role), recipe.runtime.kind
    form = recipe.draft.quantization if role == DRAFT and recipe.draft else recipe.quantization.format
    if form in UNIFIED_ONLY:
        return ()
    if role == DRAFT:
        return (own,) if kind == "tensorrt" else ()
    if recipe.quantization.export_tensor_parallel is None:
        return (own,) if kind in ("tensorrt", "cpu") else ()
    sizes = sorted(set(recipe.quantization.export_tensor_parallel))
    return tuple(
        own if kind == "tensorrt" and size == own.tensor else Parallelism(tensor=size) for size in sizes
    )


UNIFIED_ONLY = ("auto", "w4a16_nvfp4")  # formats that no engine takes
UNIFIED = "hf"  # folder of the Hugging Face export within a calibration


@dataclass(frozen=True, slots=True)
class EvaluatedExport:
    """One of the checkpoints that a calibration exports, which the gate judges."""

    folder: str  # within the calibration: "hf", "trtllm-tp2"
    kv_scale: float | None = None  # of an FP8 cache, if the runtime computes with its own; None: the files'
    precision: Precision = "f32"  # that the runtime computes in, as the recipe says; "auto": either


def evaluated_exports(recipe: Recipe) -> tuple[EvaluatedExport, ...]:
    """List all exports of the calibrated target, the export that the recipe's runtime loads first."""
    ranks = [EvaluatedExport(size.folder) for size in rank_exports(recipe, TARGET)]
    kind = recipe.runtime.kind
    own = kind == "pytorch" and recipe.quantization.kv_cache == "fp8"
    precision = recipe.runtime.precision if isinstance(recipe.runtime, CpuRuntime) else "f32"
    unified = EvaluatedExport(UNIFIED, llmapi.fp8_cache_scale() if own else None, precision)
    if kind != "tensorrt":
        return (unified, *ranks)
    loaded = parallelism(recipe, TARGET).folder
    return (*sorted(ranks, key=lambda export: export.folder != loaded), unified)


class _Planner:
    def __init__(self, recipe: Recipe, around: PlanFacts) -> None:
        self._recipe, self._around = recipe, around
        self._made: dict[str, Step] = {}

    def steps(self) -> Iterator[Step]:
        for role in self._recipe.sources:
            yield self._fetch(role)
        if self._formats():
            yield self._dataset()
        for role, form in self._formats().items():
            if form == "auto":
                yield self._sensitivity(role)
            yield self._calibrate(role)
        if TARGET in self._formats():
            yield self._evaluate()
        for role in self._roles():
            if self._is_split(role):
                yield self._convert(role)
            yield self._build(role)
        yield self._package()

    def _roles(self) -> tuple[str, ...]:
        return (TARGET,) if self._recipe.draft is None else (TARGET, DRAFT)

    def _formats(self) -> dict[str, str]:
        """Role -> quantization format, for the checkpoints that are calibrated."""
        formats = {TARGET: self._recipe.quantization.format}
        if self._recipe.draft is not None:
            formats[DRAFT] = self._recipe.draft.quantization
        return {role: chosen for role, chosen in formats.items() if chosen != "none"}

    def _step(self, name: str, settings: Mapping[str, Json], inputs: Mapping[str, str]) -> Step:
        stage = name.partition(".")[0]
        key = ArtifactKey(
            stage=stage,
            settings={"revision": REVISIONS[stage], **settings},
            inputs={role: self._made[step].key.digest for role, step in inputs.items()},
            tools=dict(self._around.tools.get(stage, {})),
            resumable=stage == "fetch",
        )
        self._made[name] = Step(name, stage, key, dict(inputs))
        return self._made[name]

    def _fetch(self, role: str) -> Step:
        return self._step(f"fetch.{role}", dict(self._around.sources[role]), {})

    def _dataset(self) -> Step:
        calibration = self._recipe.quantization.calibration
        assert calibration is not None, "the recipe's rules ask for it with every format but none"
        gate = self._recipe.quantization.gate or Gate()
        settings: dict[str, Json] = {
            **self._around.dataset,
            "samples": calibration.samples,
            "max_tokens": calibration.max_tokens,
            "seed": calibration.seed,
            "heldout_samples": gate.samples,
        }
        if calibration.allow_sample_count:
            settings["allow_sample_count"] = True  # so that the manifest says that the bounds were set aside
        return self._step("dataset", settings, {"checkpoint": f"fetch.{TARGET}"})

    def _sensitivity(self, role: str) -> Step:
        """The cost of each candidate of `auto`, which no budget changes."""
        quantization = self._recipe.quantization
        assert quantization.calibration is not None, "the recipe's rules ask for it"
        assert quantization.auto is not None, "the recipe's rules ask for it"
        settings: dict[str, Json] = {
            "formats": sorted(quantization.auto.formats),
            "batch_size": quantization.calibration.batch_size,
            "awq_block_size": quantization.awq_block_size,
        }
        inputs = {"checkpoint": f"fetch.{role}", "dataset": "dataset"}
        return self._step(f"sensitivity.{role}", settings, inputs)

    def _calibrate(self, role: str) -> Step:
        quantization, exports = self._recipe.quantization, rank_exports(self._recipe, role)
        assert quantization.calibration is not None, (
            "the recipe's rules ask for it with every format but none"
        )
        settings: dict[str, Json] = {
            "format": self._formats()[role],
            "batch_size": quantization.calibration.batch_size,  # changes last digits of the scales
            "kv_cache": quantization.kv_cache,
            "awq_block_size": quantization.awq_block_size,
            "export_tensor_parallel": [size.tensor for size in exports],
        }
        settings |= {
            f"export_{kind}_parallel": [getattr(size, kind) for size in exports]
            for kind in ("pipeline", "expert")
            if any(getattr(size, kind) > 1 for size in exports)
        }
        inputs = {"checkpoint": f"fetch.{role}", "dataset": "dataset"}
        if settings["format"] == "auto" and quantization.auto is not None:
            settings["effective_bits"] = quantization.auto.effective_bits
            inputs["sensitivity"] = f"sensitivity.{role}"
        return self._step(f"calibrate.{role}", settings, inputs)

    def _evaluate(self) -> Step:
        inputs = {"checkpoint": f"fetch.{TARGET}", "calibrated": f"calibrate.{TARGET}", "dataset": "dataset"}
        judged: list[Json] = []
        for export in evaluated_exports(self._recipe):
            precision = {} if export.precision == "f32" else {"precision": export.precision}
            judged.append({"folder": export.folder, "kv_scale": export.kv_scale, **precision})
        return self._step("evaluate", {"judged": judged}, inputs)

    def _is_split(self, role: str) -> bool:
        return self._recipe.runtime.kind == "tensorrt" and role not in self._formats()

    def _convert(self, role: str) -> Step:
        """The checkpoint of one model for the ranks of `tensorrt`, unquantized."""
        sizes = parallelism(self._recipe, role)
        return self._step(f"convert.{role}", dict(asdict(sizes)), {"checkpoint": f"fetch.{role}"})

    def _build(self, role: str) -> Step:
        source = f"calibrate.{role}" if role in self._formats() else f"fetch.{role}"
        ranks = {"ranks": f"convert.{role}"} if self._is_split(role) else {}
        return self._step(f"build.{role}", dict(self._around.build[role]), {"checkpoint": source} | ranks)

    def _package(self) -> Step:
        gate = {"evaluation": "evaluate"} if "evaluate" in self._made else {}
        inputs = gate | {role: f"build.{role}" for role in self._roles()} | {"tokenizer": f"fetch.{TARGET}"}
        inputs |= {role: f"fetch.{role}" for role in self._recipe.sources if role not in self._roles()}
        return self._step("package", dict(self._around.package), inputs)
