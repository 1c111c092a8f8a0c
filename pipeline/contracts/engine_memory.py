"""How much of a GPU an engine takes besides its weights, and what a token costs in its KV cache.

Answers from `data/engine_memory.yaml`. All sizes are bytes on one GPU (one rank).

>>> kv_bytes_per_token(layers=32, kv_heads=8, head_size=128, kv_cache="fp8")   # Llama 3.1 8B
65536
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pipeline.contracts import read_facts
from pipeline.contracts.version_range import holds


def activation_bytes(
    *, has_experts: bool, tensor_parallel: int, max_num_tokens: int, heads: int, head_size: int
) -> int:
    """Bytes of the activations of a step."""
    facts = _data()["activation"]
    coefficient = _at(facts["coefficients"]["moe" if has_experts else "dense"], tensor_parallel)
    return max(math.ceil(2 * max_num_tokens * heads * head_size * coefficient), int(facts["least_bytes"]))


def nccl_bytes(tensor_parallel: int) -> int:
    """Bytes of the buffers in which ranks exchange activations."""
    return int(_at(_data()["nccl_bytes"]["values"], tensor_parallel))


def other_bytes() -> int:
    """Bytes of CUDA contexts, code and decoder buffers, once a GPU."""
    return int(_data()["other_bytes"]["value"])


def default_fraction() -> float:
    """Share for the KV cache of what is free after loading, where a recipe gives none."""
    return float(_data()["default_fraction"]["value"])


def cpu_process_bytes() -> int:
    """Bytes that the embedded engine's process takes besides weights and KV caches."""
    return int(_data()["cpu_process_bytes"]["value"])


def cpu_pool_bytes() -> int:
    """Most bytes that the embedded engine takes for KV caches where a recipe gives no size."""
    return int(_data()["cpu_pool_bytes"]["value"])


def cpu_step_tokens() -> int:
    """Most tokens that the embedded engine computes in a step where a recipe gives no number."""
    return int(_data()["cpu_step_tokens"]["value"])


def cpu_expert_bytes(form: str) -> float:
    """Bytes that a weight of an expert takes in the embedded engine, by the format that it is served in."""
    values = _data()["cpu_expert_bytes"]["values"]
    return float(values.get(form, values["others"]))


def cpu_linear_bytes(
    rows: int, columns: int, form: str, precision: str, *, awq_block: int = 128, dtype: str = "bfloat16"
) -> int:
    """Bytes of a linear layer in the embedded engine, as its kernels pack it.

    Args:
        form: as for `linear_bytes`; or "int8_head": an output projection that the engine rounds.
        precision: type that the model is computed in, "float32" or "bfloat16".
        awq_block: as for `linear_bytes`.
        dtype: type of what is not quantized.
    """
    facts = _data()["cpu_linear"]
    if cpu_widens(form):
        stored = dtype_bytes(dtype) if form == "none" else dtype_bytes("bfloat16")
        held = math.ceil(rows * columns * min(stored, dtype_bytes(precision)))
    elif each := facts["values"].get(form):
        held = math.ceil(rows * columns * float(each))
    else:
        held = linear_bytes(rows, columns, form, awq_block=awq_block)
    return (2 if precision == "bfloat16" and cpu_packs_twice(form) else 1) * held


def cpu_packs_twice(form: str) -> bool:
    """Tell whether the embedded engine packs weights of a format for short steps in bf16, and again for longer ones."""
    return form in _data()["cpu_linear"]["twice"]


def cpu_widens(form: str) -> bool:
    """Tell whether the embedded engine holds a format in 16 bits, or weights that are not quantized as they are."""
    return form in _data()["cpu_linear"]["widened"]


def cpu_bf16_pays(hidden: int) -> bool:
    """Tell whether the embedded engine is faster in bf16 with models of a hidden size, where the processor has it."""
    return hidden >= cpu_bf16_hidden()


def cpu_bf16_hidden() -> int:
    """Return the smallest hidden size for which bf16 pays."""
    return int(_data()["cpu_bf16_hidden"]["value"])


def cpu_precision(precision: str, hidden: int, *, bf16: bool) -> str:
    """Return the type that the embedded engine computes a model in: "f32" or "bf16".

    Args:
        precision: `runtime.precision` of the recipe.
        bf16: whether the processor has arithmetic for it.
    """
    if precision != "auto":
        return precision
    return "bf16" if bf16 and cpu_bf16_pays(hidden) else "f32"


def cpu_kv_cache(asked: str, hidden: int, *, bf16: bool) -> str:
    """Return the type that the embedded engine keeps keys and values in: "f32", "bf16" or "f16".

    Args:
        asked: as for `cpu_precision`.
        bf16: as for `cpu_precision`.
    """
    computed = cpu_precision(asked, hidden, bf16=bf16)
    return "f16" if computed == "f32" and asked == "auto" and cpu_bf16_pays(hidden) else computed


def derives_windows(version: str) -> bool:
    """Whether a release by itself keeps only the window of layers with sliding-window attention."""
    return holds(version, _data()["kv_cache"]["windows_since"], None)


def kv_reserve() -> float:
    """Share of a KV cache's pool that no token can use."""
    return float(_data()["kv_reserve"]["value"])


def graph_sizes(max_batch: int) -> tuple[int, ...]:
    """Batch sizes for which the PyTorch backend captures CUDA graphs, padding enabled.

    >>> graph_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    powers = (2**power for power in range(8, max_batch.bit_length()))
    return tuple(
        sorted(
            {size for size in (*_data()["cuda_graph"]["sizes"], *powers) if size < max_batch} | {max_batch}
        )
    )


def graph_bytes() -> int:
    """Most bytes of the CUDA graph of one batch size."""
    each: int = _data()["cuda_graph"]["bytes"]
    return each


@lru_cache(maxsize=4096)  # layers of a model are alike, and a plan asks for each of them many times
def linear_bytes(
    rows: int,
    columns: int,
    form: str,
    *,
    awq_block: int = 128,
    dtype: str = "bfloat16",
    bits: float | None = None,
) -> int:
    """Bytes of a linear layer [rows, columns] with its scales.

    Args:
        form: a format of the recipe, or a published one such as `fp8_block`.
        awq_block: inputs that share a scale, in formats that leave it open.
        dtype: type of weights that are not quantized.
        bits: average of a weight where the format is `auto`.

    >>> linear_bytes(4096, 4096, "fp8")
    16777224
    """
    if form == "none":
        return rows * columns * dtype_bytes(dtype)
    if form == "auto":
        return math.ceil(rows * columns * (bits or 16) / 8)
    facts: Mapping[str, float] = _data()["weights"]["formats"][form]
    group = facts.get("group_size") or min(awq_block, columns)
    tile = facts.get("tile_size", 1)
    return math.ceil(
        facts["weight"] * rows * columns
        + facts.get("scalars", 0)
        + facts.get("row", 0) * rows
        + facts.get("column", 0) * columns
        + facts.get("group", 0) * rows * math.ceil(columns / group)
        + facts.get("tile", 0) * math.ceil(rows / tile) * math.ceil(columns / tile)
    )


_SIDE = 4096  # of the matrix whose bits a weight are taken


def format_bits(form: str, awq_block: int = 128) -> float:
    """Bits that an engine holds for a weight of a format, its scales included.

    >>> format_bits("int4_awq", 64)
    4.254
    """
    return round(linear_bytes(_SIDE, _SIDE, form, awq_block=awq_block) * 8 / _SIDE**2, 3)


def formats() -> tuple[str, ...]:
    """Formats whose bytes are known: "none" (as published), those of recipes, and published ones."""
    return ("none", "auto", *_data()["weights"]["formats"])


def mxfp4_multiples() -> Mapping[str, int]:
    """Sizes to which kernels round up the `hidden` size and the `inner` size of experts."""
    multiples: Mapping[str, int] = _data()["weights"]["mxfp4_multiples"]
    return multiples


def dtypes() -> tuple[str, ...]:
    """Types of numbers that models are published in."""
    return tuple(_data()["weights"]["bytes"])


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number that stays as published. Raises KeyError for an unknown type."""
    return int(_data()["weights"]["bytes"][dtype])


def awq_vocabulary_multiple() -> int:
    """Multiple to which vocabularies are rounded up in AWQ checkpoints."""
    return int(_data()["weights"]["awq_vocabulary_multiple"])


def sources(section: str) -> tuple[str, ...]:
    """Where the figures of a section come from: "ai-dynamo/aiconfigurator @…", …"""
    facts = _data()
    return tuple(facts["sources"][name] for name in facts[section]["source"])


def kv_number_bytes(kv_cache: str) -> float:
    """Bytes of one number of keys and values. Raises KeyError for an unknown type."""
    return float(_data()["kv_cache"]["bytes"][kv_cache])


def kv_bytes_per_token(
    *,
    layers: int,
    kv_heads: int,
    head_size: int,
    kv_cache: str,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int:
    """Bytes of one token's keys and values on one rank; `layers` and `kv_heads` are those of the whole model.

    Raises:
        KeyError: the data type of the KV cache (`kv_cache`: bfloat16, fp8, …) is not known.
    """
    size = kv_number_bytes(kv_cache)
    numbers = 2 * math.ceil(layers / pipeline_parallel) * math.ceil(kv_heads / tensor_parallel) * head_size
    return math.ceil(numbers * size)


def _at(by_size: Mapping[int, float], tensor_parallel: int) -> float:
    """The figure for a tensor-parallel size, or for the next smaller size that is known."""
    return by_size[max(size for size in by_size if size <= tensor_parallel)]


def _data() -> Mapping[str, Any]:
    return read_facts("engine_memory.yaml")
