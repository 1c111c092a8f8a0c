"""Constants of the performance model: shares of the peaks that are reached, and times that no peak explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pipeline.contracts.gpus import gpu_generation
from pipeline.contracts.releases import Track
from pipeline.resources import parse_yaml

# Exchanges between machines, by NCCL's own model of its trees with the protocol of small messages (NVIDIA/nccl
# src/graph/tuning.cc, baseLatencies and hwLatencies): 6.8 microseconds, and, there and back, 0.6 for each of 7 GPUs of
# a machine and 5 for each level of machines. On two machines of 8 H20, nccl-tests took 46 with the protocol
# of larger messages (https://github.com/NVIDIA/nccl/issues/1244).
_TREE_S, _NETWORK_S = 15.2e-6, 10e-6


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Constants of one family of GPUs and one backend. Shares are of the peak; times are seconds."""

    memory: float  # share of the memory bandwidth, weights and activations
    cache: float  # ... keys and values
    arithmetic: float  # share of the tensor cores' peak, matrix products
    attention: float  # ... attention over long prompts
    link: float  # share of one direction of the link between GPUs
    exchange_s: float  # an all-reduce, before its first byte; over PCIe, for each hop of it
    layer_s: float  # kernels of one layer that move next to nothing
    step_s: float  # of the host for a step: scheduling, launching, sampling
    hides_step: bool  # whether that runs beside the step before, so that only what is longer shows
    sequence_s: float  # ... for each sequence in the step
    eager: (
        float  # times by which small kernels take longer in steps with prompts, which no CUDA graph replays
    )
    prompt_s: float  # once for a prompt, or for those that are done together
    overlap: float  # how sharply the slower of memory and arithmetic hides the other: 1 adds them, many hides
    # Factors of `memory` and `arithmetic` for weights that are not in 16 bits, by what they are computed in.
    fp8_memory: float = 1.0
    fp8_arithmetic: float = 1.0
    fp4_memory: float = 1.0
    fp4_arithmetic: float = 1.0
    # ... for routed experts, many small matrices: grouped products (CUTLASS, DeepGEMM) ...
    expert_memory: float = 1.0
    expert_arithmetic: float = 1.0
    expert_layer_s: float = 0.0  # routing, sorting and adding up in a layer of experts
    fused_memory: float = 1.0  # ... and TensorRT-LLM's own kernels for Blackwell, which do all that at once
    fused_arithmetic: float = 1.0
    fused_layer_s: float = 0.0
    skew: float = 0.0  # standard deviation of the logarithm of how often experts are chosen
    gather_s: float = 0.0  # an all-gather or a reduce-scatter, before its first byte; else an all-reduce
    tree_s: float = 0.0  # an exchange between machines, beyond one within a machine ...
    network_s: float = 0.0  # ... and for each time that their number doubles
    latent_layer_s: float = 0.0  # further projections in a layer of multi-head latent attention
    latent_prompt_s: float = 0.0  # ... and as much more in steps with prompts, whose kernels are others
    block_product_s: float = 0.0  # scaling the inputs of a product in FP8 blocks
    request_s: float = 0.0  # of a request outside the engine: HTTP and tokens; in its first token alone
    admit_s: float = 0.0  # from one request to the next, which a front end hands over one by one


def efficiency(
    name: str, track: Track, given: Mapping[str, Any] | None = None, *, pdl: bool = True
) -> Efficiency:
    """Look up the constants for a GPU and a backend.

    Args:
        pdl: Whether kernels of the PyTorch backend are launched before the one before has ended (programmatic dependent
            launch, from compute capability 9.0 on).
        given: Replaces the fitted constants, while they are being fitted.

    Raises:
        UserError: the GPU is not known, or of no listed generation.
    """
    facts = fitted_constants()["constants"] if given is None else given
    kind = gpu_generation(name)
    of_family, of_track = facts["families"][kind.constants], facts["tracks"][track]
    link, shared = facts["links"][kind.links], facts["shared"]
    late = track == "pytorch" and not (pdl and kind.sm >= 90)
    kernels = "grouped" if kind.constants == "blackwell" else "expert"  # CUTLASS's reach another share of it
    grouped = facts["formats"][kernels]
    kernel_s = 1e-6 * (1 + shared["late"] * late)
    return Efficiency(
        memory=of_family["memory"],
        cache=of_family["cache"],
        arithmetic=of_family["arithmetic"],
        attention=shared["attention"],
        link=shared["link"],
        exchange_s=link * 1e-6,
        layer_s=shared["layer_us"] * kernel_s,
        step_s=of_track["step_us"] * 1e-6,
        hides_step=track == "pytorch",  # its overlap scheduler, on by default
        sequence_s=of_track["sequence_us"] * 1e-6,
        eager=of_track["eager"],
        prompt_s=shared["prompt_us"] * 1e-6,
        overlap=shared["overlap"],
        **{
            f"{name}_{part}": value
            for name, parts in {**facts["formats"], "expert": grouped}.items()
            if name != "grouped"
            for part, value in parts.items()
        },
        expert_layer_s=shared[f"{kernels}_layer_us"] * kernel_s,
        fused_layer_s=shared["fused_layer_us"] * kernel_s,
        skew=shared["skew"],
        gather_s=shared["gather_us"] * 1e-6,
        tree_s=_TREE_S,
        network_s=_NETWORK_S,
        latent_layer_s=shared["latent_layer_us"] * kernel_s,
        latent_prompt_s=shared["latent_prompt_us"] * 1e-6,
        block_product_s=shared["block_product_us"] * kernel_s,
        request_s=of_track["request_us"] * 1e-6,
        admit_s=of_track["admit_us"] * 1e-6,
    )


@cache
def fitted_constants() -> Mapping[str, Any]:
    """Return the whole of `data/efficiency.yaml`."""
    file = resources.files("pipeline.plan.performance") / "data" / "efficiency.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
