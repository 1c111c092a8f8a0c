"""Work that a model asks of a rank: bytes and operations, by the token and by the step.

They are counted from the same matrices as the memory plan (`plan.memory.tensors`). Not counted: norms and biases, which
are small, and the embedding, of which a step reads a few rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from pipeline.contracts.gpus import Arithmetic, GpuRates, gpu
from pipeline.models.blocks import Cache, WeightTensor
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.memory.tensors import (
    alike,
    cache_state_bytes,
    cache_token_bytes,
    rank_part,
    served_format,
    stage_layers,
    stage_weights,
    tensor_bytes,
)

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
# Points of a standard normal distribution, and their weights (Gauss and Hermite, of degree 7).
_points, _weights = np.polynomial.hermite_e.hermegauss(7)  # type: ignore[no-untyped-call]
_NORMAL = tuple(zip(_points.tolist(), (_weights / _weights.sum()).tolist(), strict=True))
_FUSING = (100, 120)  # compute capabilities of TensorRT-LLM's own kernels for experts; others take CUTLASS's


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The work of a rank in the first stage (with the output projection, which the last has); two operations
    a weight.
    """

    layers: int  # of the stage
    expert_layers: int  # ... with routed experts
    latent_layers: int  # ... with multi-head latent attention
    block_products: int  # in all layers, without experts, whose inputs own kernels scale block by block
    stages: int
    ranks: int  # that share each layer, or with attention data parallelism the experts
    attention_ranks: int  # ... that have sequences of their own; 1: all work on the same
    dense_bytes: float  # weights that every step reads
    expert_bytes: float  # weights of all experts there
    experts: int  # of the whole model; 0: none
    expert_ways: int  # groups of ranks that have experts of their own
    experts_per_token: int
    fuses_experts: (
        bool  # in TensorRT-LLM's own kernels for Blackwell, which route, multiply and add up in one go
    )
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
    network_bytes: float  # ... over its network card, where ranks are in several machines
    exchanges: int  # all-reduces in a step, or with attention data parallelism ways to experts and back

    def expert_share(self, tokens: float, skew: float = 0.0) -> float:
        """Share of the experts' weights that the busiest rank reads in a step.

        The mean, and as many standard deviations more as the largest of so many ranks has.

        Args:
            skew: Standard deviation of the logarithm of how often experts are chosen; 0: all alike often.
        """
        if not self.experts:
            return 0.0
        even = self.experts_per_token / self.experts
        left: float = sum(
            weight * (1 - min(even * math.exp(skew * point - skew**2 / 2), 1.0)) ** tokens
            for point, weight in _NORMAL
        )
        deviation = (left * (1 - left) * self.expert_ways / self.experts) ** 0.5
        return 1 - larger(left - self._busiest * deviation, 0.0)

    def expert_work(self, tokens: float, skew: float = 0.0) -> float:
        """Tokens that the experts of the busiest rank compute, as a multiple of what each computes on average."""
        chosen = larger(tokens * self.experts_per_token, 1.0)
        uneven = (
            math.expm1(skew**2) / self.experts
        )  # of each rank's experts together, but for the number of ranks
        excess: float = self._busiest * ((self.expert_ways - 1) * (1 / chosen + uneven)) ** 0.5
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
            for name in ("layers", "expert_layers", "latent_layers", "block_products", "exchanges")
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
    sent, away, exchanges = _exchanges(model, len(held), expert_layers, arithmetic, rates)
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
        block_products=_scaled_products(dense) if model.format == "fp8_block" else 0,
        stages=split.pipeline,
        ranks=split.tensor,
        attention_ranks=split.request_groups,
        dense_bytes=sum(count * tensor_bytes(tensor, model) for tensor, count in alike((*dense, *heads))),
        expert_bytes=sum(count * tensor_bytes(tensor, model) for tensor, count in alike(experts)),
        experts=sizes.experts,
        expert_ways=split.expert,
        experts_per_token=sizes.experts_per_token,
        fuses_experts=model.expert_kernels == "TRTLLM" and _FUSING[0] <= gpu(rates.gpu).sm < _FUSING[1],
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
        network_bytes=away,
        exchanges=exchanges,
    )


def _scaled_products(matrices: Sequence[WeightTensor]) -> int:
    """Count the products of linear layers; those of the same input (queries, keys and values) are one."""
    linear = [tensor for tensor in matrices if tensor.quantizable]
    # What is split by columns takes what the others have computed.
    return len(
        {(tensor.name.rpartition(".")[0], tensor.columns, tensor.split == "columns") for tensor in linear}
    )


def _exchanges(
    model: ModelSpec, layers: int, expert_layers: int, arithmetic: Arithmetic, rates: GpuRates
) -> tuple[float, float, int]:
    """Bytes that a rank sends in an exchange for each token, those of its network card, and exchanges in a step.

    Ranks that share layers reduce twice a layer, in rings: each sends each byte twice, less its own share. With
    attention data parallelism, tokens go to the experts and come back: all to all ranks (gathered, and reduced as they
    are scattered), or, where more ranks have experts than a token chooses, each to those, if NVLink joins them all or
    the kernels are WIDEEP's. On their way there they are in FP4 or MXFP8 where experts compute in it.

    Between machines there are as many rings as network cards, so that each card carries its part of one; a token that
    goes to its experts alone passes the card of its own rank.
    """
    sizes, split = model.sizes, model.split
    held = rates.machine_gpus
    sent = sizes.hidden * (split.tensor - 1) / split.tensor
    if split.request_groups == 1:
        sent *= 2 * _ACTIVATION_BYTES
        return sent, sent / held, 2 * layers if split.tensor > 1 else 0
    there = (
        0.5625 if arithmetic == "fp4" else 1.03 if model.format == "mxfp4" and arithmetic == "fp8" else 2.0
    )
    sent *= (there + _ACTIVATION_BYTES) / 2
    joined = rates.nvlink_gpus >= split.tensor or model.expert_kernels == "WIDEEP"
    if split.expert <= sizes.experts_per_token or not joined:
        return sent, sent / held, 2 * expert_layers
    sent *= sizes.experts_per_token / split.expert
    return sent, sent * max(split.tensor - held, 0) / (split.tensor - 1), 2 * expert_layers


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


def larger(first: float, second: float) -> float:
    """Return the larger of two numbers, or of the numbers of two arrays."""
    return (first + second + abs(first - second)) / 2
