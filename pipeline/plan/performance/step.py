"""One step of an engine: what is in it, and how long a roofline says that it takes.

A step costs what its slowest part costs, and parts follow each other:

    matrices    weights over the memory bandwidth, or operations over the tensor cores' rate, whichever is longer
    attention   keys and values over the memory bandwidth, and the operations of long prompts
    activations what goes to memory and back between matrices
    exchange    all-reduces of the ranks that share a layer
    overhead    kernels too small to be limited by either, and what the host needs for a step
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.contracts.gpu_rates import Rates
from pipeline.plan.performance.efficiency import Efficiency
from pipeline.plan.performance.load import ModelLoad


@dataclass(frozen=True, slots=True)
class Step:
    """Sequences that generate, and a piece of a prompt beside them."""

    sequences: float = 0  # that generate
    context: float = 0  # tokens that each of them has behind it
    tokens_each: float = 1  # that each of them adds: more than one where drafts are verified
    prompt: float = 0  # tokens of prompts
    prompt_before: float = 0  # tokens of that prompt that earlier steps have done

    @property
    def tokens(self) -> float:
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
        return self.matrices + self.attention + self.activations + self.exchange + self.overhead


def step_time(step: Step, load: ModelLoad, rates: Rates, efficiency: Efficiency) -> StepTime:
    """Of a step through all stages: each works on its share of the sequences, one after the other."""
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


def _stage(step: Step, stages: int) -> Step:
    """What is in one stage while the others work on the rest. A single sequence cannot be shared out."""
    if stages == 1:
        return step
    return Step(
        sequences=max(step.sequences / stages, min(step.sequences, 1.0)),
        context=step.context,
        tokens_each=step.tokens_each,
        prompt=step.prompt / stages if step.sequences else step.prompt,
        prompt_before=step.prompt_before,
    )


def _matrices(step: Step, load: ModelLoad, rates: Rates, efficiency: Efficiency) -> float:
    read = load.dense_bytes + load.expert_bytes * load.expert_share(step.tokens)
    memory = read / (rates.memory_gb_s * 1e9 * efficiency.memory)
    outputs = step.sequences * step.tokens_each + (1 if step.prompt else 0)
    plain = step.tokens * load.plain_ops + outputs * load.output_ops
    quantized = step.tokens * load.quantized_ops
    arithmetic = quantized / rates.tflops[load.arithmetic] + plain / rates.tflops["bf16"]
    arithmetic /= 1e12 * efficiency.arithmetic
    sharpness = efficiency.overlap
    return float((memory**sharpness + arithmetic**sharpness) ** (1 / sharpness))


def _attention(step: Step, load: ModelLoad, rates: Rates, efficiency: Efficiency) -> float:
    cached = step.sequences * step.context + (step.prompt_before if step.prompt else 0)
    memory = cached * load.kv_bytes / (rates.memory_gb_s * 1e9 * efficiency.cache)
    pairs = step.sequences * step.tokens_each * step.context
    pairs += step.prompt * (step.prompt_before + step.prompt / 2)
    return memory + pairs * load.pair_ops / (rates.tflops["bf16"] * 1e12 * efficiency.attention)


def _exchange(step: Step, load: ModelLoad, rates: Rates, efficiency: Efficiency) -> float:
    """Rings: every rank sends each byte twice, less its own share."""
    if not load.exchanges:
        return 0.0
    sent = 2 * (load.ranks - 1) / load.ranks * step.tokens * load.exchange_bytes
    each = sent / (rates.link_gb_s(load.ranks) * 1e9 * efficiency.link)
    return load.exchanges * (efficiency.exchange_s + each)
