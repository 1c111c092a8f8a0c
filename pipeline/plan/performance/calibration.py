"""Constants of the performance model for one GPU and runtime, or for one processor, from loads measured there.

`fit` makes one; `pipeline plan` keeps it in the store, as one small YAML file a device and runtime, and forecasts with
it until it is removed. A calibration speaks for what it was measured on: another model, format or number of GPUs,
or a load far from the measured ones, has a forecast without an interval and with a warning.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field

from pipeline.contracts import llm_args
from pipeline.contracts.gpus import GpuRates, gpu_rates
from pipeline.contracts.releases import Track
from pipeline.contracts.version_range import holds
from pipeline.document_faults import read_yaml
from pipeline.plan.memory import plan_memory
from pipeline.plan.memory.spec import DeploymentSpec
from pipeline.plan.performance.constants import Efficiency, efficiency
from pipeline.plan.performance.estimates import Estimate
from pipeline.plan.performance.queueing import Workload
from pipeline.plan.performance.served_engine import PromptBalance
from pipeline.plan.performance.service import DeploymentModel, EngineOptions
from pipeline.recipe import PyTorchRuntime, Recipe
from pipeline.recipe.source import LocalSource

Figure = Literal["ttft_alone", "ttft_loaded", "itl", "tokens_per_s"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
FIGURE_NAMES: Mapping[Figure, str] = {
    "ttft_alone": "first token, alone",
    "ttft_loaded": "first token under load, p95",
    "itl": "between tokens, mean",
    "tokens_per_s": "output tokens/s",
}

# Release whose TRTLLM_ENABLE_PDL is on by default (https://github.com/NVIDIA/TensorRT-LLM/issues/16330).
_PDL_SINCE = "1.2.0"
_NEAR = 1.5  # lengths and loads that are as many times beyond those measured are still taken for the like
_HEAD = "# Constants of the performance model, written by `pipeline plan calibrate RECIPE`.\n"
# Peaks of a processor are not among the data: its constants are GB/s and 10^9 operations a second themselves.
_CPU_PEAKS = GpuRates("cpu", 1.0, {"bf16": 1e-3}, 1.0, 0)
# Where the fit of a processor begins.
_CPU_GUESS = Efficiency(
    memory=10.0, cache=10.0, arithmetic=30.0, attention=10.0, link=1.0, exchange_s=0.0, layer_s=20e-6, step_s=1e-3,
    hides_step=False, sequence_s=3e-4, eager=0.0, prompt_s=5e-3, overlap=2.0, request_s=1e-3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The figures of a benchmark under one load.

    Attributes:
        source: File that it is from.
        concurrency: Requests at a time, on average.
        work: Mean lengths of prompts and answers, in tokens.
        ttft_p50_ms: Median time to the first token.
        ttft_p95_ms: Its 95th percentile.
        itl_ms: Mean time of an output token after the first.
        tokens_per_s: Output tokens a second, of the whole deployment.
        acceptance: Acceptance of each token that the draft proposed, 0 to 1; None without a draft.
    """

    source: str
    concurrency: int
    work: Workload
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_ms: float
    tokens_per_s: float
    acceptance: float | None = None

    def figures(self) -> dict[Figure, float]:
        """Figures that are held against the model: the first token alone is that of one request at a time."""
        first: dict[Figure, float] = (
            {"ttft_alone": self.ttft_p50_ms} if self.concurrency == 1 else {"ttft_loaded": self.ttft_p95_ms}
        )
        return {**first, "itl": self.itl_ms, "tokens_per_s": self.tokens_per_s}

    @property
    def label(self) -> str:
        """A name for people."""
        return f"{self.concurrency} at a time, {self.work.prompt_tokens}/{self.work.output_tokens} tokens"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CalibratedConstants(_Section):
    """Constants that replace the published ones: see `Efficiency`. On a processor `memory` and `cache` are GB/s, and
    `arithmetic` and `attention` 10^9 operations a second.
    """

    memory: float = Field(gt=0)
    cache: float = Field(gt=0)
    arithmetic: float = Field(gt=0)
    attention: float = Field(gt=0)
    link: float = Field(gt=0)
    exchange_us: float = Field(ge=0)
    layer_us: float = Field(ge=0)
    step_us: float = Field(ge=0)
    sequence_us: float = Field(ge=0)
    prompt_us: float = Field(ge=0)
    overlap: float = Field(ge=1)
    hides_step: bool
    eager: float = Field(default=0.0, ge=0)
    fp8_memory: float = Field(default=1.0, gt=0)
    fp8_arithmetic: float = Field(default=1.0, gt=0)
    fp4_memory: float = Field(default=1.0, gt=0)
    fp4_arithmetic: float = Field(default=1.0, gt=0)
    expert_memory: float = Field(default=1.0, gt=0)
    expert_arithmetic: float = Field(default=1.0, gt=0)
    expert_layer_us: float = Field(default=0.0, ge=0)
    fused_memory: float = Field(default=1.0, gt=0)
    fused_arithmetic: float = Field(default=1.0, gt=0)
    fused_layer_us: float = Field(default=0.0, ge=0)
    gather_us: float = Field(default=0.0, ge=0)
    skew: float = Field(default=0.0, ge=0)
    tree_us: float = Field(default=0.0, ge=0)
    network_us: float = Field(default=0.0, ge=0)
    latent_layer_us: float = Field(default=0.0, ge=0)
    latent_prompt_us: float = Field(default=0.0, ge=0)
    block_product_us: float = Field(default=0.0, ge=0)
    request_us: float = Field(default=0.0, ge=0)
    admit_us: float = Field(default=0.0, ge=0)

    def efficiency(self) -> Efficiency:
        """The same in seconds."""
        values = self.model_dump()
        return Efficiency(
            **{
                f"{name[:-3]}_s" if name.endswith("_us") else name: value * 1e-6
                if name.endswith("_us")
                else value
                for name, value in values.items()
            }
        )

    @classmethod
    def of(cls, efficiency: Efficiency) -> Self:
        """The same in microseconds, with four digits."""
        values = {
            f"{name[:-2]}_us" if name.endswith("_s") else name: value
            if isinstance(value, bool)
            else float(f"{value * (1e6 if name.endswith('_s') else 1):.4g}")
            for name, value in asdict(efficiency).items()
        }
        return cls.model_validate(values)


class FigureErrors(_Section):
    """How far forecasts of one figure were off, relative: 0.1 is ten percent."""

    count: int = Field(description="Loads that have the figure.")
    before: float | None = Field(description="Median, with the constants before; null where there were none.")
    fitted: float = Field(description="Median, of loads that the constants were fitted to.")
    left_out: float | None = Field(
        description="Median, each load forecast from the others; null with a single load."
    )
    low: float | None = Field(description="Smallest measured over forecast, of loads left out.")
    high: float | None = Field(description="Largest.")


class CalibrationReach(_Section):
    """The set-up that was measured."""

    model: str
    format: str
    gpus: int
    acceptance: float | None = Field(
        description="Acceptance of each token that the draft proposed; null without a draft."
    )
    concurrency: tuple[int, int]
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


class SpeedCalibration(_Section):
    """Constants of one device and runtime, how they were found, and how far they are off."""

    schema_version: Literal["pipeline.calibration/1"] = Field(
        default="pipeline.calibration/1", alias="schema"
    )
    device: str = Field(description="GPU as recipes name it, or the name of a processor.")
    runtime: Literal["tensorrt", "pytorch", "cpu"]
    recipe: str
    made: str = Field(description="ISO 8601, UTC.")
    measured: tuple[str, ...] = Field(description="Files, with when they were measured.")
    constants: CalibratedConstants
    undetermined: tuple[str, ...] = Field(
        description="Constants that the measurements say nearly nothing of; these are about as they were."
    )
    errors: dict[Figure, FigureErrors]
    reach: CalibrationReach

    @property
    def rates(self) -> GpuRates:
        """Peaks that the constants are shares of."""
        return _CPU_PEAKS if self.runtime == "cpu" else gpu_rates(self.device)

    @property
    def source(self) -> str:
        """Where its figures come from, for people."""
        count = max(errors.count for errors in self.errors.values())
        return f"{count} load{'s' if count > 1 else ''} measured on {self.device} ({self.made[:10]}, {self.recipe})"

    def estimate(self, figure: Figure, value: float, doubts: Sequence[str]) -> Estimate:
        """Put the interval that loads left out fell into around a value.

        Args:
            doubts: Parts of it that were not measured (`unchecked`); with any there is no interval.
        """
        found = self.errors.get(figure)
        if doubts or found is None or found.low is None or found.high is None:
            return Estimate(value)
        return Estimate(value, value * min(found.low, 1.0), value * max(found.high, 1.0))

    def unchecked(
        self, spec: DeploymentSpec, model: str, work: Workload, batch: int, *, drafts: bool
    ) -> tuple[str, ...]:
        """List what of a deployment was not measured; empty if all of it was, or the like.

        Args:
            model: Where the target comes from, as a recipe has it.
            batch: Requests at a time.
            drafts: Whether a draft's gain is in the forecast.
        """
        reach, target = self.reach, spec.models[0]
        doubts = {
            f"the model {model}": model != reach.model,
            f"weights in {target.format}": target.format != reach.format,
            f"{spec.ranks} GPUs": spec.ranks != reach.gpus,
            "drafts": drafts and reach.acceptance is None,
            "an engine without its draft": reach.acceptance is not None and not drafts,
            f"prompts of {work.prompt_tokens} tokens": not _near(work.prompt_tokens, reach.prompt_tokens),
            f"answers of {work.output_tokens} tokens": not _near(work.output_tokens, reach.output_tokens),
            f"{batch} requests at a time": not _near(batch, reach.concurrency),
        }
        return tuple(doubt for doubt, holds in doubts.items() if holds)

    def write(self, path: Path) -> None:
        """Write it as YAML; whoever reads meanwhile sees the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.new")
        values = self.model_dump(mode="json", by_alias=True)
        draft.write_text(
            _HEAD + yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            UnreadableFile: It cannot be read.
            InvalidInput: It is no calibration, with everything that is wrong with it.
        """
        return read_yaml(cls, path)


def deployment_model(
    spec: DeploymentSpec,
    track: Track | None,
    calibration: SpeedCalibration | None,
    options: EngineOptions,
) -> DeploymentModel:
    """Give models their constants: those of a calibration, or of published figures.

    Args:
        track: Backend on a GPU; None on a processor, which without a calibration has constants that are but a guess.
        calibration: Calibration of the device and the runtime; None: constants of published figures.

    Raises:
        UserError: The GPU, its rates or its generation are not known.
    """
    if calibration is not None:
        rates, constants = calibration.rates, calibration.constants.efficiency()
    elif track is None:
        rates, constants = _CPU_PEAKS, _CPU_GUESS
    else:
        rates, constants = gpu_rates(spec.device), efficiency(spec.device, track, pdl=options.pdl)
        constants = replace(constants, hides_step=constants.hides_step and options.overlaps)
    memory = plan_memory(spec)
    blocks = memory.blocks * spec.request_groups
    return DeploymentModel(spec, rates, constants, options, blocks, memory.block_tokens)


def recipe_model(
    recipe: Recipe, spec: DeploymentSpec, calibration: SpeedCalibration | None
) -> DeploymentModel:
    """Do so for a recipe; see `deployment_model`."""
    track = None if recipe.runtime.kind == "cpu" else recipe.runtime.kind
    return deployment_model(spec, track, calibration, engine_options(recipe))


def proposed_tokens(recipe: Recipe) -> int:
    """Tokens that a round proposes: by a draft, or by the target's own prediction layers (MTP); 0 without either."""
    if recipe.draft is not None:
        return recipe.draft.max_draft_tokens
    chosen = recipe.runtime.speculation if isinstance(recipe.runtime, PyTorchRuntime) else None
    return chosen.layers if chosen is not None and chosen.method == "mtp" else 0


def engine_options(recipe: Recipe) -> EngineOptions:
    """Return the settings of a recipe's engine that its speed depends on."""
    runtime = recipe.runtime
    return EngineOptions(
        recipe.scheduler.chunked_context,
        proposed_tokens(recipe),
        overlaps_steps(recipe),
        _balance(recipe),
        pdl=not isinstance(runtime, PyTorchRuntime) or holds(runtime.version, _PDL_SINCE, None),
    )


def _balance(recipe: Recipe) -> tuple[int, int] | None:
    """Steps for which prompts wait, with TensorRT-LLM's defaults where the recipe leaves them out."""
    runtime = recipe.runtime
    given = runtime.llm_args.get("attention_dp_config") if isinstance(runtime, PyTorchRuntime) else None
    if not isinstance(given, dict) or not given.get("enable_balance"):
        return None
    default = PromptBalance()
    timeout = given.get("timeout_iters", default.timeout_steps)
    wait = given.get("batching_wait_iters", default.wait_steps)
    return (max(1, timeout), max(0, wait)) if isinstance(timeout, int) and isinstance(wait, int) else None


def overlaps_steps(recipe: Recipe) -> bool:
    """Tell whether a step may be prepared while the last one runs; two models that take turns cannot."""
    runtime = recipe.runtime
    if not isinstance(runtime, PyTorchRuntime):
        return True
    chosen = recipe.draft or runtime.speculation
    in_turns = chosen is not None and llm_args.speculation(runtime.version, chosen.method).two_models
    return runtime.overlap_scheduler is not False and not in_turns


def model_name(recipe: Recipe) -> str:
    """Name a recipe's target, wherever its folder lies: "hf:org/name", or "local:name"."""
    source = recipe.model.source
    return f"local:{source.path.name}" if isinstance(source, LocalSource) else str(source)


def calibration_file(device: str, runtime: str) -> str:
    """Name of the file of a device and runtime.

    >>> calibration_file("h100-sxm-80g", "tensorrt"), calibration_file("AMD EPYC 7B13", "cpu")
    ('h100-sxm-80g-tensorrt.yaml', 'amd-epyc-7b13-cpu.yaml')
    """
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-{runtime}.yaml"


def error_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest of measured over forecast."""
    return round(min(ratios), 3), round(max(ratios), 3)


def median_error(ratios: Sequence[float]) -> float:
    """Median of relative errors, from measured over forecast."""
    return round(statistics.median(abs(1 / ratio - 1) for ratio in ratios), 4)


def _near(value: float, measured: tuple[int, int]) -> bool:
    low, high = measured
    return low / _NEAR <= value <= math.ceil(high * _NEAR)
