"""A roofline of one step of an engine: how long takes what a model asks of a rank (`model_load`).

A step costs what its slowest part costs, and parts follow each other:

    matrices    weights over the memory bandwidth, or operations over the tensor cores' rate, whichever is longer:
                those that every token passes, and routed experts, of which a step reads those that its tokens chose
    attention   keys and values over the memory bandwidth, and operations: of MLA also while generating
    activations what goes to memory and back between matrices
    exchange    all-reduces of the ranks that share a layer; with attention data parallelism, tokens to experts and
                back; between machines, over the network
    overhead    kernels too small to be limited by either, and what the host needs for a step

All of it is plain arithmetic, so that the fields of a step may be numbers or numpy arrays of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeline.contracts.gpus import GpuRates
from pipeline.plan.performance.constants import Efficiency
from pipeline.plan.performance.model_load import ModelLoad, larger


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Sequences that generate, and pieces of prompts beside them."""

    sequences: float = 0  # that generate
    context: float = 0  # tokens that each of them has behind it
    tokens_each: float = 1  # that each of them adds: more than one where drafts are verified
    prompt: float = 0  # tokens of prompts
    prompt_before: float = 0  # tokens of that prompt that earlier steps have done
    longest: float = 0  # tokens of them that the busiest rank computes

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
    stage, stages, constants = _stage(step, load.stages), load.stages, efficiency
    rank = _rank(stage, load.attention_ranks)
    bandwidth = rates.memory_gb_s * 1e9 * constants.memory
    expert_s = constants.fused_layer_s if load.fuses_experts else constants.expert_layer_s
    kernels = load.layers * constants.layer_s + load.expert_layers * expert_s
    kernels += load.block_products * constants.block_product_s
    prompts = step.prompt > 0
    latent_s = constants.latent_layer_s + constants.latent_prompt_s * prompts
    kernels = stages * (kernels * (1 + constants.eager * prompts) + load.latent_layers * latent_s)
    read_s, pair_s = attention_rates(load, rates, constants)
    pairs = rank.prompt * (rank.prompt_before + rank.prompt / 2)
    matrices = stages * _matrices(rank, stage.tokens, load, rates, constants)
    attention = stages * (rank.sequences * rank.tokens_each * rank.context * read_s + pairs * pair_s)
    activations = stages * _beside(rank, load, rates, constants, bandwidth)
    exchange = stages * _exchange(stage.tokens, load, rates, constants)
    host = host_time(step, load, constants)
    device = matrices + attention + activations + exchange + kernels
    shown = larger(host - device, 0.0) if constants.hides_step else host
    return StepTime(matrices, attention, activations, exchange, kernels + shown)


def host_time(step: EngineStep, load: ModelLoad, efficiency: Efficiency) -> float:
    """Compute the seconds that the host needs for a step, beside the step before where it can."""
    return efficiency.step_s + efficiency.sequence_s * step.sequences / load.attention_ranks


def attention_rates(load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds for each token that a generated one reads, and for each pair of tokens of a prompt, in one stage."""
    operations = rates.tflops["bf16"] * 1e12 * efficiency.attention
    read_s = load.kv_bytes / (rates.memory_gb_s * 1e9 * efficiency.cache) + load.read_ops / operations
    return read_s, load.pair_ops / operations


def _stage(step: EngineStep, stages: int) -> EngineStep:
    """The share that is in one stage while the others work on the rest. A single sequence cannot be shared out."""
    if stages == 1:
        return step
    alone = step.sequences - larger(step.sequences - 1.0, 0.0)
    return replace(
        step,
        sequences=larger(step.sequences / stages, alone),
        prompt=step.prompt / (1 + (stages - 1) * (step.sequences > 0)),
    )


def _rank(step: EngineStep, ranks: int) -> EngineStep:
    """The busiest rank's share, where each has sequences and prompts of its own: prompts are balanced over them."""
    if ranks == 1:
        return step
    alone = step.sequences - larger(step.sequences - 1.0, 0.0)
    return replace(
        step,
        sequences=larger(step.sequences / ranks, alone),
        prompt=larger(step.prompt / ranks, step.longest),
    )


def _matrices(
    rank: EngineStep, tokens: float, load: ModelLoad, rates: GpuRates, efficiency: Efficiency
) -> float:
    """Seconds of the matrices that all tokens of a rank pass, and of the experts, which `tokens` of all ranks pass."""
    constants, low = efficiency, load.arithmetic
    narrow, quick = 1.0, 1.0
    if low == "fp8":
        narrow, quick = constants.fp8_memory, constants.fp8_arithmetic
    elif low == "fp4":
        narrow, quick = constants.fp4_memory, constants.fp4_arithmetic
    bandwidth = rates.memory_gb_s * 1e9 * constants.memory * narrow
    fast, slow = (rates.tflops[arithmetic] * 1e12 * constants.arithmetic for arithmetic in (low, "bf16"))
    outputs = rank.sequences * rank.tokens_each + (rank.prompt > 0)
    plain = rank.tokens * load.plain_ops + outputs * load.output_ops
    dense = _slower(
        load.dense_bytes / bandwidth,
        rank.tokens * load.quantized_ops / (fast * quick) + plain / slow,
        constants,
    )
    if not load.experts:
        return dense
    memory, arithmetic = (
        (constants.fused_memory, constants.fused_arithmetic)
        if load.fuses_experts
        else (constants.expert_memory, constants.expert_arithmetic)
    )
    read = load.expert_bytes * load.expert_share(tokens, constants.skew) / (bandwidth * memory)
    routed = tokens * load.expert_work(tokens, constants.skew) * load.expert_ops
    routed = routed / (fast * quick * arithmetic)
    return dense + _slower(read, routed, constants)


def _slower(memory: float, arithmetic: float, efficiency: Efficiency) -> float:
    sharpness = efficiency.overlap
    both: float = (memory**sharpness + arithmetic**sharpness) ** (1 / sharpness)
    return both


def _beside(
    rank: EngineStep, load: ModelLoad, rates: GpuRates, efficiency: Efficiency, bandwidth: float
) -> float:
    """Seconds of activations, of windows and of states."""
    cache = rates.memory_gb_s * 1e9 * efficiency.cache
    windows = rank.prompt * load.window_ops / (rates.tflops["bf16"] * 1e12 * efficiency.attention)
    return (
        rank.tokens * load.activation_bytes / bandwidth + rank.sequences * load.held_bytes / cache + windows
    )


def _exchange(tokens: float, load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> float:
    """Seconds in which ranks exchange their tokens' activations."""
    if load.ranks == 1:
        return 0.0
    machines, each = rates.machines(load.ranks), 1e9 * efficiency.link
    sent = load.exchange_bytes / rates.link_gb_s(load.ranks)
    begun = efficiency.gather_s if load.attention_ranks > 1 else efficiency.exchange_s
    if machines > 1:
        begun += efficiency.tree_s + efficiency.network_s * math.log2(machines)
        sent = larger(sent, load.network_bytes / rates.network_gb_s)
    return load.exchanges * (begun + tokens * sent / each)
