"""A roofline of one step of an engine: what a model asks of a rank, and how long that takes.

Bytes and operations are counted from the same matrices as the memory plan (`plan.memory.tensors`). Not counted: norms
and biases, which are small, and the embedding, of which a step reads a few rows. A step costs what its slowest part
costs, and parts follow each other:

    matrices    weights over the memory bandwidth, or operations over the tensor cores' rate, whichever is longer:
                those that every token passes, and routed experts, of which a step reads those that its tokens chose
    attention   keys and values over the memory bandwidth, and operations: of MLA also while generating
    activations what goes to memory and back between matrices
    exchange    all-reduces of the ranks that share a layer; with attention data parallelism, tokens to experts and back
    overhead    kernels too small to be limited by either, and what the host needs for a step

All of it is plain arithmetic, so that the fields of a step may be numbers or numpy arrays of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from pipeline.contracts.gpus import Arithmetic, GpuRates
from pipeline.models.blocks import Cache, WeightTensor
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.memory.tensors import (
    cache_state_bytes,
    cache_token_bytes,
    rank_part,
    served_format,
    stage_layers,
    stage_weights,
    tensor_bytes,
)
from pipeline.plan.performance.constants import Efficiency

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
    expert_layers: int  # ... with routed experts
    latent_layers: int  # ... with multi-head latent attention
    block_layers: int  # ... whose inputs are scaled block by block, by kernels of their own
    stages: int
    ranks: int  # that share each layer, or with attention data parallelism the experts
    attention_ranks: int  # ... that have sequences of their own; 1: all work on the same
    dense_bytes: float  # weights that every step reads
    expert_bytes: float  # weights of all experts there
    experts: int  # of the whole model; 0: none
    expert_ways: int  # groups of ranks that have experts of their own
    experts_per_token: int
    quantized_ops: float  # for each token, in `arithmetic`, without experts
    expert_ops: float  # ... of experts
    plain_ops: float  # for each token, in bf16
    output_ops: float  # for each sequence: the output projection, in bf16
    arithmetic: Arithmetic
    kv_bytes: float  # keys and values of one token, in layers that see all
    held_bytes: float  # what windows and states of one sequence read in a step
    pair_ops: float  # attention of a prompt's token to another, in layers that see all
    window_ops: float  # ... of a prompt's token, in layers that see a window
    read_ops: float  # ... of a generated token to another
    activation_bytes: float  # read and written for each token, between matrices
    exchange_bytes: float  # that a rank sends in one exchange, for each token of all ranks
    exchanges: int  # all-reduces in a step, or with attention data parallelism ways to experts and back

    def expert_share(self, tokens: float) -> float:
        """Share of the experts' weights that the busiest rank reads in a step, if tokens choose experts alike often.

        The mean, and as many standard deviations more as the largest of so many ranks has.
        """
        if not self.experts:
            return 0.0
        left: float = (1 - self.experts_per_token / self.experts) ** tokens
        deviation = (left * (1 - left) * self.expert_ways / self.experts) ** 0.5
        return 1 - larger(left - self._busiest * deviation, 0.0)

    def expert_work(self, tokens: float) -> float:
        """Tokens that the experts of the busiest rank compute, as a multiple of what each computes on average."""
        chosen = larger(tokens * self.experts_per_token, 1.0)
        excess: float = self._busiest * ((self.expert_ways - 1) / chosen) ** 0.5
        # No rank computes more than all of them.
        return 1 + excess - larger(1 + excess - self.expert_ways, 0.0)

    @property
    def _busiest(self) -> float:
        """Standard deviations by which the largest of so many values lies above their mean (Blom's approximation)."""
        ways = self.expert_ways
        return NormalDist().inv_cdf((ways - 0.375) / (ways + 0.25)) if ways > 1 else 0.0

    def scaled(self, share: float) -> ModelLoad:
        """Make the load of so many of its layers (a share), with the whole output projection."""
        names = (
            "dense_bytes", "expert_bytes", "quantized_ops", "expert_ops", "plain_ops", "kv_bytes", "held_bytes",
            "pair_ops", "window_ops", "read_ops", "activation_bytes",
        )  # fmt: skip
        counts = {
            name: round(getattr(self, name) * share)
            for name in ("layers", "expert_layers", "latent_layers", "block_layers", "exchanges")
        }
        return replace(self, **{name: getattr(self, name) * share for name in names}, **counts)


def model_load(model: ModelSpec, rates: GpuRates) -> ModelLoad:
    """Count what a model asks of a rank, by the token and by the step."""
    sizes, split = model.sizes, model.split
    held = stage_layers(model, 0)
    matrices = [tensor for tensor in stage_weights(model, 0) if tensor.columns > 1]
    dense = [tensor for tensor in matrices if not tensor.is_expert]
    experts = [tensor for tensor in matrices if tensor.is_expert]
    share = sizes.experts_per_token / sizes.experts if sizes.experts else 0.0
    heads = _output(model)
    arithmetic = _arithmetic(model.format, rates)
    expert_layers = sum(any(tensor.is_expert for tensor in sizes.blocks[index].weights) for index in held)
    sent, exchanges = _exchanges(model, len(held), expert_layers, arithmetic)
    attention = [_attention_work(sizes.blocks[index].caches, model) for index in held]
    kv_bytes, held_bytes, pair_ops, window_ops, read_ops = (
        sum(part) for part in zip(*attention, strict=True)
    )
    return ModelLoad(
        layers=len(held),
        expert_layers=expert_layers,
        latent_layers=sum(
            any(cache.kind == "latent attention" for cache in sizes.blocks[index].caches) for index in held
        ),
        block_layers=len(held) if model.format == "fp8_block" else 0,
        stages=split.pipeline,
        ranks=split.tensor,
        attention_ranks=split.request_groups,
        dense_bytes=sum(tensor_bytes(tensor, model) for tensor in (*dense, *heads)),
        expert_bytes=sum(tensor_bytes(tensor, model) for tensor in experts),
        experts=sizes.experts,
        expert_ways=split.expert,
        experts_per_token=sizes.experts_per_token,
        quantized_ops=sum(_ops(tensor, model) for tensor in dense if served_format(tensor, model) != "none"),
        expert_ops=share * sum(_ops(tensor, model) for tensor in experts),
        plain_ops=sum(_ops(tensor, model) for tensor in dense if served_format(tensor, model) == "none"),
        output_ops=sum(_ops(tensor, model) for tensor in heads),
        arithmetic=arithmetic,
        kv_bytes=kv_bytes,
        held_bytes=held_bytes,
        pair_ops=pair_ops,
        window_ops=window_ops,
        read_ops=read_ops,
        activation_bytes=sum(_activations(tensor, model, share) for tensor in matrices),
        exchange_bytes=sent,
        exchanges=exchanges,
    )


def _exchanges(
    model: ModelSpec, layers: int, expert_layers: int, arithmetic: Arithmetic
) -> tuple[float, int]:
    """Bytes that a rank sends in an exchange for each token, and exchanges in a step.

    Ranks that share layers reduce twice a layer, in rings: each sends each byte twice, less its own share. With
    attention data parallelism, tokens go to the experts and come back: all to all ranks, or, where there are more ranks
    with experts than a token chooses, each to those. On their way there they are in FP4 or MXFP8 where experts compute
    in it.
    """
    sizes, split = model.sizes, model.split
    away = sizes.hidden * (split.tensor - 1) / split.tensor
    if split.request_groups == 1:
        return 2 * away * _ACTIVATION_BYTES, 2 * layers if split.tensor > 1 else 0
    share = min(1.0, sizes.experts_per_token / split.expert) if split.expert > 1 else 1.0
    there = (
        0.5625 if arithmetic == "fp4" else 1.03 if model.format == "mxfp4" and arithmetic == "fp8" else 2.0
    )
    return away * share * (there + _ACTIVATION_BYTES) / 2, 2 * expert_layers


def _attention_work(caches: Sequence[Cache], model: ModelSpec) -> tuple[float, float, float, float, float]:
    """A layer's bytes for each token before and for each sequence; operations of a prompt's pair, of its token within
    windows, and of a generated token's pair.
    """
    sizes, ways = model.sizes, model.split.shared
    heads = math.ceil(sizes.heads / ways)
    found = [0.0] * 5
    for kept in caches:
        each = replace(kept, is_bounded=False)
        numbers = cache_token_bytes(each, model.kv_cache, ways)
        pair = 4.0 * heads * sizes.head_dim
        if kept.kind == "latent attention" and sizes.latent is not None:
            # Prompts are attended to in full heads; while generating, matrices are absorbed into the latent space.
            latent = sizes.latent
            prompt = 2.0 * heads * (latent.nope + latent.rope + latent.value)
            read = 2.0 * heads * (2 * latent.kv_rank + latent.rope)
            found = [a + b for a, b in zip(found, (numbers, 0.0, prompt, 0.0, read), strict=True)]
        elif kept.window:
            parts = (0.0, kept.window * numbers, 0.0, kept.window * pair, 0.0)
            found = [a + b for a, b in zip(found, parts, strict=True)]
        elif kept.state:
            found[1] += 2.0 * cache_state_bytes(kept, model.kv_cache, ways)
        elif kept.kind == "sparse index":
            found[0] += numbers
        else:
            found = [a + b for a, b in zip(found, (numbers, 0.0, pair, 0.0, pair), strict=True)]
    return found[0], found[1], found[2], found[3], found[4]


def _arithmetic(form: str, rates: GpuRates) -> Arithmetic:
    wanted = _ARITHMETIC[form]
    if form == "mxfp4" and "fp4" in rates.tflops:
        wanted = "fp8"  # activations in MXFP8, where the tensor cores take both
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
    kernels = load.layers * constants.layer_s + load.expert_layers * constants.expert_layer_s
    kernels += load.block_layers * constants.block_layer_s
    prompts = step.prompt > 0
    latent_s = constants.latent_layer_s + constants.latent_prompt_s * prompts
    kernels = stages * (kernels * (1 + constants.eager * prompts) + load.latent_layers * latent_s)
    read_s, pair_s = attention_rates(load, rates, constants)
    pairs = rank.prompt * (rank.prompt_before + rank.prompt / 2)
    time = StepTime(
        matrices=stages * _matrices(rank, stage.tokens, load, rates, constants),
        attention=stages * (rank.sequences * rank.tokens_each * rank.context * read_s + pairs * pair_s),
        activations=stages * _beside(rank, load, rates, constants, bandwidth),
        exchange=stages * _exchange(stage.tokens, load, rates, constants),
        overhead=kernels,
    )
    host = host_time(step, load, constants)
    shown = larger(host - time.total, 0.0) if constants.hides_step else host
    return replace(time, overhead=kernels + shown)


def host_time(step: EngineStep, load: ModelLoad, efficiency: Efficiency) -> float:
    """Compute the seconds that the host needs for a step, beside the step before where it can."""
    return efficiency.step_s + efficiency.sequence_s * step.sequences / load.attention_ranks


def attention_rates(load: ModelLoad, rates: GpuRates, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds for each token that a generated one reads, and for each pair of tokens of a prompt, in one stage."""
    operations = rates.tflops["bf16"] * 1e12 * efficiency.attention
    read_s = load.kv_bytes / (rates.memory_gb_s * 1e9 * efficiency.cache) + load.read_ops / operations
    return read_s, load.pair_ops / operations


def larger(first: float, second: float) -> float:
    """Return the larger of two numbers, or of the numbers of two arrays."""
    return (first + second + abs(first - second)) / 2


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
    read = load.expert_bytes * load.expert_share(tokens) / (bandwidth * constants.expert_memory)
    routed = tokens * load.expert_work(tokens) * load.expert_ops
    routed = routed / (fast * quick * constants.expert_arithmetic)
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
    each = tokens * load.exchange_bytes / (rates.link_gb_s(load.ranks) * 1e9 * efficiency.link)
    return load.exchanges * (efficiency.exchange_s + each)
