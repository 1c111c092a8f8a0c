"""A roofline of one step of an engine: what a model asks of a rank, and how long that takes.

Bytes and operations are counted from the same matrices as the memory plan (`plan.memory.tensors`). Not counted: norms
and biases, which are small, and the embedding, of which a step reads a few rows. A step costs what its slowest part
costs, and parts follow each other:

    matrices    weights over the memory bandwidth, or operations over the tensor cores' rate, whichever is longer
    attention   keys and values over the memory bandwidth, and the operations of long prompts
    activations what goes to memory and back between matrices
    exchange    all-reduces of the ranks that share a layer
    overhead    kernels too small to be limited by either, and what the host needs for a step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from pipeline.contracts.gpus import Arithmetic, GpuRates, gpu_generation
from pipeline.contracts.releases import Track
from pipeline.models.blocks import WeightTensor
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.memory.tensors import (
    kv_token_bytes,
    rank_part,
    served_format,
    stage_layers,
    stage_weights,
    tensor_bytes,
)
from pipeline.resources import parse_yaml


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Constants of one family of GPUs and one backend. Shares are of the peak; times are seconds."""

    memory: float  # share of the memory bandwidth, weights and activations
    cache: float  # ... keys and values
    arithmetic: float  # share of the tensor cores' peak, matrix products
    attention: float  # ... attention over long prompts
    link: float  # share of one direction of the link between GPUs
    exchange_s: float  # an all-reduce, before its first byte
    layer_s: float  # kernels of one layer that move next to nothing
    step_s: float  # of the host for a step: scheduling, launching, sampling
    hides_step: bool  # whether that runs beside the step before, so that only what is longer shows
    sequence_s: float  # ... for each sequence in the step
    prompt_s: float  # once for a prompt, or for those that are done together
    overlap: float  # how sharply the slower of memory and arithmetic hides the other: 1 adds them, many hides


def efficiency(name: str, track: Track, given: Mapping[str, Any] | None = None) -> Efficiency:
    """Look up the constants for a GPU and a backend.

    Args:
        given: Replaces the fitted constants, while they are being fitted.

    Raises:
        UserError: the GPU is not known, or of no listed generation.
    """
    facts = fitted_constants()["constants"] if given is None else given
    kind = gpu_generation(name)
    of_family, of_track = facts["families"][kind.constants], facts["tracks"][track]
    link = facts["links"][kind.links]
    return Efficiency(
        memory=of_family["memory"],
        cache=of_family["cache"],
        arithmetic=of_family["arithmetic"],
        attention=facts["shared"]["attention"],
        link=facts["shared"]["link"],
        exchange_s=link * 1e-6,
        layer_s=facts["shared"]["layer_us"] * 1e-6,
        step_s=facts["shared"]["step_us"] * 1e-6,
        hides_step=track == "pytorch",  # its overlap scheduler, on by default
        sequence_s=of_track["sequence_us"] * 1e-6,
        prompt_s=facts["shared"]["prompt_us"] * 1e-6,
        overlap=facts["shared"]["overlap"],
    )


@cache
def fitted_constants() -> Mapping[str, Any]:
    """Return the whole of `data/efficiency.yaml`."""
    file = resources.files("pipeline.plan.performance") / "data" / "efficiency.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data


# What a format's products are computed in. INT4 and MXFP4 weights alone are widened to 16 bits first; `auto` mixes
# formats, and is taken for FP8, which all of its mixes contain.
_ARITHMETIC: dict[str, Arithmetic] = {
    "none": "bf16",
    "int4_awq": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "w4a8_awq": "fp8",
    "auto": "fp8",
    "int8_sq": "int8",
    "nvfp4": "fp4",
    "mxfp4": "bf16",
    "fp8_row": "fp8",
    "mxfp8": "fp8",
    "w4a16_nvfp4": "bf16",
    "w4a8_nvfp4": "fp8",
    "int4": "bf16",
    "int4_zeros": "bf16",
    "int8_row": "int8",
    "int8_group": "bf16",
}
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The work of a rank in the first stage (with the output projection, which the last has); two operations
    a weight.
    """

    layers: int  # of the stage
    stages: int
    ranks: int  # that share each layer
    dense_bytes: float  # weights that every step reads
    expert_bytes: float  # weights of all experts there
    experts: int  # of the whole model; 0: none
    experts_per_token: int
    quantized_ops: float  # for each token, in `arithmetic`
    plain_ops: float  # for each token, in bf16
    output_ops: float  # for each sequence: the output projection, in bf16
    arithmetic: Arithmetic
    kv_bytes: float  # keys and values of one token
    pair_ops: float  # attention of one token to another
    activation_bytes: float  # read and written for each token, between matrices
    exchange_bytes: float  # of one all-reduce, for each token
    exchanges: int  # all-reduces in a step

    def expert_share(self, tokens: float) -> float:
        """Share of the experts' weights that a step of so many tokens reads, if tokens choose alike often."""
        if not self.experts:
            return 0.0
        return float(1 - (1 - self.experts_per_token / self.experts) ** tokens)


def model_load(model: ModelSpec, rates: GpuRates) -> ModelLoad:
    """Count what a model asks of a rank, by the token and by the step."""
    sizes, split = model.sizes, model.split
    held = stage_layers(model, 0)
    matrices = [tensor for tensor in stage_weights(model, 0) if tensor.columns > 1]
    dense = [tensor for tensor in matrices if not tensor.is_expert]
    experts = [tensor for tensor in matrices if tensor.is_expert]
    share = sizes.experts_per_token / sizes.experts if sizes.experts else 0.0
    heads = _output(model)
    return ModelLoad(
        layers=len(held),
        stages=split.pipeline,
        ranks=split.tensor,
        dense_bytes=sum(tensor_bytes(tensor, model) for tensor in (*dense, *heads)),
        expert_bytes=sum(tensor_bytes(tensor, model) for tensor in experts),
        experts=sizes.experts,
        experts_per_token=sizes.experts_per_token,
        quantized_ops=sum(_ops(tensor, model) for tensor in dense if served_format(tensor, model) != "none")
        + share * sum(_ops(tensor, model) for tensor in experts),
        plain_ops=sum(_ops(tensor, model) for tensor in dense if served_format(tensor, model) == "none"),
        output_ops=sum(_ops(tensor, model) for tensor in heads),
        arithmetic=_arithmetic(model.format, rates),
        kv_bytes=kv_token_bytes(model),
        pair_ops=4 * sizes.heads * sizes.head_dim * len(held) / split.tensor,
        activation_bytes=sum(_activations(tensor, model, share) for tensor in matrices),
        exchange_bytes=sizes.hidden * _ACTIVATION_BYTES,
        exchanges=2 * len(held) if split.tensor > 1 else 0,
    )


def _arithmetic(form: str, rates: GpuRates) -> Arithmetic:
    wanted = _ARITHMETIC[form]
    return wanted if wanted in rates.tflops else "bf16"


def _output(model: ModelSpec) -> tuple[WeightTensor, ...]:
    """The output projection, which a tied model has too: it is its embedding."""
    found = tuple(tensor for tensor in model.sizes.last if tensor.kind == "lm_head")
    return found or (WeightTensor("lm_head", model.sizes.vocab, model.sizes.hidden, "vocabulary"),)


def _ops(tensor: WeightTensor, model: ModelSpec) -> float:
    return 2.0 * rank_part(tensor, model.split).parameters


def _activations(tensor: WeightTensor, model: ModelSpec, share: float) -> float:
    held = rank_part(tensor, model.split)
    used = held.copies * share if tensor.is_expert else held.copies
    return _ACTIVATION_BYTES * (held.rows + held.columns) * used


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Sequences that generate, and a piece of a prompt beside them."""

    sequences: float = 0  # that generate
    context: float = 0  # tokens that each of them has behind it
    tokens_each: float = 1  # that each of them adds: more than one where drafts are verified
    prompt: float = 0  # tokens of prompts
    prompt_before: float = 0  # tokens of that prompt that earlier steps have done

    @property
    def tokens(self) -> float:
        """Tokens that the step computes."""
        return self.sequences * self.tokens_each + self.prompt


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, by what they are spent on."""

    matrices: float
    attention: float
    activations: float
    exchange: float
    overhead: float

    @property
    def total(self) -> float:
        """Seconds of all parts, which follow each other."""
        return self.matrices + self.attention + self.activations + self.exchange + self.overhead


def step_time(step: EngineStep, load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> StepTime:
    """Compute the time of a step through all stages: each works on its share of the sequences, one after the other."""
    stage = _stage(step, load.stages)
    bandwidth = rates.memory_gb_s * 1e9 * efficiency.memory
    kernels = load.stages * load.layers * efficiency.layer_s + efficiency.sequence_s * step.sequences
    time = StepTime(
        matrices=load.stages * _matrices(stage, load, rates, efficiency),
        attention=load.stages * _attention(stage, load, rates, efficiency),
        activations=load.stages * stage.tokens * load.activation_bytes / bandwidth,
        exchange=load.stages * _exchange(stage, load, rates, efficiency),
        overhead=kernels,
    )
    shown = max(0.0, efficiency.step_s - time.total) if efficiency.hides_step else efficiency.step_s
    return replace(time, overhead=kernels + shown)


def _stage(step: EngineStep, stages: int) -> EngineStep:
    """The share that is in one stage while the others work on the rest. A single sequence cannot be shared out."""
    if stages == 1:
        return step
    return EngineStep(
        sequences=max(step.sequences / stages, min(step.sequences, 1.0)),
        context=step.context,
        tokens_each=step.tokens_each,
        prompt=step.prompt / stages if step.sequences else step.prompt,
        prompt_before=step.prompt_before,
    )


def _matrices(step: EngineStep, load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> float:
    read = load.dense_bytes + load.expert_bytes * load.expert_share(step.tokens)
    memory = read / (rates.memory_gb_s * 1e9 * efficiency.memory)
    outputs = step.sequences * step.tokens_each + (1 if step.prompt else 0)
    plain = step.tokens * load.plain_ops + outputs * load.output_ops
    quantized = step.tokens * load.quantized_ops
    arithmetic = quantized / rates.tflops[load.arithmetic] + plain / rates.tflops["bf16"]
    arithmetic /= 1e12 * efficiency.arithmetic
    sharpness = efficiency.overlap
    return float((memory**sharpness + arithmetic**sharpness) ** (1 / sharpness))


def _attention(step: EngineStep, load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> float:
    cached = step.sequences * step.context + (step.prompt_before if step.prompt else 0)
    memory = cached * load.kv_bytes / (rates.memory_gb_s * 1e9 * efficiency.cache)
    pairs = step.sequences * step.tokens_each * step.context
    pairs += step.prompt * (step.prompt_before + step.prompt / 2)
    return memory + pairs * load.pair_ops / (rates.tflops["bf16"] * 1e12 * efficiency.attention)


def _exchange(step: EngineStep, load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> float:
    """Rings: every rank sends each byte twice, less its own share."""
    if not load.exchanges:
        return 0.0
    sent = 2 * (load.ranks - 1) / load.ranks * step.tokens * load.exchange_bytes
    each = sent / (rates.link_gb_s(load.ranks) * 1e9 * efficiency.link)
    return load.exchanges * (efficiency.exchange_s + each)
