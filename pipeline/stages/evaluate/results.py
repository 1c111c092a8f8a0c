"""The results of an evaluation: figures of each export that it compared with the original, kept in metrics.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from pipeline.contracts import engine_memory
from pipeline.errors import StageError
from pipeline.recipe.runtime import Precision

SCHEMA = 2
FILE = "metrics.json"


Computed = Literal["f32", "bf16", "f16_cache"]
"""Types that a runtime computes in. "f16_cache": f32, but keys and values in f16 (`cpu` on processors without bf16)."""


def computed_name(files: str, computed: Computed) -> str:
    """Name an export as it is computed: "hf", "hf in bf16"."""
    ways = {"f32": "", "bf16": " in bf16", "f16_cache": " in f32 with keys and values in f16"}
    return files + ways[computed]


def perplexity(loss: float, positions: int) -> float:
    """Perplexity of a text, from the summed negative log-likelihood (nats) of its tokens, `positions` of them."""
    return math.exp(loss / positions)


@dataclass(frozen=True, slots=True)
class Export:
    """A checkpoint that is compared with its original.

    Attributes:
        directory: A unified Hugging Face checkpoint; or, if its name begins with "trtllm-", a TensorRT-LLM checkpoint,
            all ranks of which are put together.
        kv_scale: The scale of an FP8 cache, if the runtime computes with one of its own; None: those of the files.
        precision: Type that the runtime computes in; "auto": by the processor that serves.
    """

    directory: Path
    kv_scale: float | None = None
    precision: Precision = "f32"

    def computed(self, hidden: int) -> tuple[Computed, ...]:
        """Types that a model of a hidden size may be served in, "bf16" first."""
        if self.precision != "auto":
            return (self.precision,)
        return ("bf16", "f16_cache") if engine_memory.cpu_bf16_pays(hidden) else ("f32",)


@dataclass(frozen=True, slots=True)
class BootstrapEstimate:
    """A figure, and the interval that holds 95 % of its bootstrap resamples (of samples, not of positions)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class WorstPosition:
    """A position where the two models differ much."""

    sample: int  # 0-based line of heldout.jsonl
    position: int  # 0-based index of the token that is predicted
    kl: float  # nats
    before: str  # the text that leads to it
    actual: str  # the token that follows in the text
    reference: str  # the best token of the original
    reference_probability: float
    quantized: str  # the best token of the quantized model
    quantized_probability: float


@dataclass(frozen=True, slots=True)
class KlHistogram:
    """Positions counted by their KL divergence; bins are equal on a logarithmic scale."""

    edges: tuple[float, ...]  # one more than counts; nats
    counts: tuple[int, ...]
    below: int  # positions under the first edge


@dataclass(frozen=True, slots=True)
class PrecisionLoss:
    """Figures of an export that is computed with roundings, beside the same files in f32."""

    perplexity_increase: BootstrapEstimate  # relative
    top1_agreement: BootstrapEstimate


@dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """Figures of one export, computed in one type: of `positions`, each token of each held-out sample but the first."""

    files: str  # the folder that was read: "hf", "trtllm-tp2"
    format: str
    group_size: int | None
    kv_cache: str | None
    kv_scale: float | None  # of the cache, if the runtime computes with its own; None: the files'
    samples: int
    positions: int
    calibration_samples: int | None  # None where it is not known
    reference_perplexity: float
    quantized_perplexity: float
    perplexity_increase: BootstrapEstimate  # relative: 0.02 is 2 percent
    top1_agreement: BootstrapEstimate  # share of positions where both have the same best token
    mean_kl: BootstrapEstimate  # KL(reference || quantized), nats
    p99_kl: float
    max_kl: float
    histogram: KlHistogram
    worst: tuple[WorstPosition, ...]
    precision: Computed = "f32"  # that the export was computed in; its original always in f32
    beside_f32: PrecisionLoss | None = None  # where it was not f32

    @property
    def name(self) -> str:
        """ "hf", or "hf in bf16"."""
        return computed_name(self.files, self.precision)


def write_metrics(metrics: Sequence[EvaluationMetrics], directory: Path) -> None:
    """Write metrics.json, the figures of all exports, into a folder."""
    content = {"schema": SCHEMA, "exports": [dataclasses.asdict(export) for export in metrics]}
    text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True)
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def read_metrics(directory: Path) -> tuple[EvaluationMetrics, ...]:
    """Read the figures that an evaluation left in its folder, for each export.

    Raises:
        StageError: Another version of pipeline wrote them.
    """
    content = json.loads((directory / FILE).read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise StageError(f"{directory / FILE} was written by another version of pipeline; evaluate again")
    return TypeAdapter(tuple[EvaluationMetrics, ...]).validate_python(content["exports"])
