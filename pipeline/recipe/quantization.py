"""How the weights and the KV cache are stored, on what they are calibrated, and what quality that may cost.

The formats are those of NVIDIA ModelOpt: FP8 (W8A8), INT4 AWQ (W4A16), W4A8 AWQ (INT4 weights, FP8
activations), INT8 SmoothQuant, NVFP4 (W4A4), W4A16 NVFP4, whose weights alone are quantized and need no calibration,
and `auto`, which chooses per layer under a budget of bits.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.recipe.sections import RecipeSection
from pipeline.recipe.source import Dataset

LayerFormat = Literal["fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4", "w4a16_nvfp4"]
DraftFormat = Literal["none", LayerFormat]
Format = Literal["none", LayerFormat, "auto"]
KvCacheFormat = Literal["auto", "fp8"]

MIN_SAMPLES, MAX_SAMPLES = 128, 512


class Calibration(RecipeSection):
    """The text on which the scales are measured."""

    dataset: Dataset = Field(
        description="A set defined in calibration/, or a JSONL file.",
        examples=["support", "local:my-set.jsonl"],
    )
    samples: int = Field(
        default=MAX_SAMPLES,
        ge=1,
        le=100_000,
        description=f"Number of samples: {MIN_SAMPLES} to {MAX_SAMPLES} unless allow_sample_count is true.",
    )
    max_tokens: int = Field(default=512, ge=8, le=131_072, description="Samples are cut to this many tokens.")
    seed: int = Field(default=1234, ge=0, le=2**31 - 1, description="Which samples are drawn.")
    batch_size: int = Field(
        default=8, ge=1, le=1024, description="Samples that run through the model together."
    )
    allow_sample_count: bool = Field(
        default=False,
        description=f"Accept fewer than {MIN_SAMPLES} or more than {MAX_SAMPLES} samples; recorded in the manifests.",
    )


class Gate(RecipeSection):
    """How far the quantized model may be from the original on held-out text; beyond it the build stops."""

    max_perplexity_increase: float = Field(
        default=0.02, ge=0, le=10, description="Relative: 0.02 is 2 percent."
    )
    min_top1_agreement: float = Field(
        default=0.97, ge=0, le=1, description="Share of positions with the same best token."
    )
    max_kl: float | None = Field(
        default=None, gt=0, le=100, description="Mean KL divergence, in nats per position."
    )
    samples: int = Field(default=64, ge=1, le=10_000, description="Held-out samples that are compared.")


class AutoQuantization(RecipeSection):
    """The budget of format `auto`: the best mix of formats, layer by layer."""

    effective_bits: float = Field(
        ge=4, le=16, description="Average bits a weight of the linear layers, scales included, at most."
    )
    formats: tuple[LayerFormat, ...] = Field(
        default=("int4_awq", "fp8"), strict=False, min_length=1, description="Formats to choose from."
    )


class Quantization(RecipeSection):
    """Settings of the calibrate and evaluate stages."""

    format: Format = Field(
        default="none", description="Format of the weights; none keeps the checkpoint as it is."
    )
    kv_cache: KvCacheFormat = Field(
        default="auto", description="Format of the KV cache; auto is that of the activations."
    )
    awq_block_size: Literal[64, 128] = Field(
        default=128, description="Weights that share one AWQ scale; for w4a8_awq on a GPU, 128."
    )
    auto: AutoQuantization | None = Field(default=None, description="The budget, for format auto.")
    calibration: Calibration | None = Field(default=None, description="Needed by every format but none.")
    gate: Gate | None = Field(
        default=None, description="Without it the figures are recorded and nothing is refused."
    )
    export_tensor_parallel: tuple[Annotated[int, Field(ge=1, le=64)], ...] | None = Field(
        default=None,
        strict=False,
        description="Tensor-parallel sizes to export TensorRT-LLM checkpoints for; by default the runtime's.",
    )
