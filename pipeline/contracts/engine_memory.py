"""How much of a GPU an engine takes besides its weights, and what a token costs in its KV cache.

Answers from `data/engine_memory.yaml`. All sizes are bytes on one GPU (one rank).

>>> kv_bytes_per_token(layers=32, kv_heads=8, head_size=128, kv_cache="fp8")   # Llama 3.1 8B
65536
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

Family = Literal["llama", "moe", "other"]


def activation_bytes(
    *, family: Family, tensor_parallel: int, max_num_tokens: int, heads: int, head_size: int
) -> int:
    """Activations of a step of `max_num_tokens`; `heads` are the attention heads of all ranks."""
    facts = _data()["activation"]
    coefficient = _at(facts["coefficients"][family], tensor_parallel)
    return max(math.ceil(2 * max_num_tokens * heads * head_size * coefficient), int(facts["least_bytes"]))


def nccl_bytes(tensor_parallel: int) -> int:
    """What the ranks need to exchange activations."""
    return int(_at(_data()["nccl_bytes"]["values"], tensor_parallel))


def other_bytes() -> int:
    """CUDA contexts, code and decoder buffers: once for a GPU."""
    return int(_data()["other_bytes"]["value"])


def kv_bytes_per_token(
    *,
    layers: int,
    kv_heads: int,
    head_size: int,
    kv_cache: str,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int:
    """Keys and values of one token on one rank. `layers` and `kv_heads` are those of the whole model.

    Raises:
        KeyError: the data type of the KV cache (`kv_cache`: bfloat16, fp8, …) is not known.
    """
    size = int(_data()["kv_cache"]["bytes"][kv_cache])
    return (
        2 * math.ceil(layers / pipeline_parallel) * math.ceil(kv_heads / tensor_parallel) * head_size * size
    )


def _at(by_size: Mapping[int, float], tensor_parallel: int) -> float:
    """The figure for a tensor-parallel size, or for the next smaller one that is known."""
    return by_size[max(size for size in by_size if size <= tensor_parallel)]


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.contracts") / "data" / "engine_memory.yaml"
    data: Mapping[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return data
