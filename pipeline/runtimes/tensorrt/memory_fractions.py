"""Shares of a draft and its target of the memory of one GPU.

Each engine, when it loads, takes `kv_cache_free_gpu_mem_fraction` of what is free then (after its own weights and
buffers) for its KV cache, and no more than `max_tokens_in_paged_kv_cache`. So two fractions alone mean one thing if
the target loads first and another if the draft does, and Triton loads models side by side. Solved here are both
fractions and the cap, so that

- both caches hold the same number of tokens, since a draft works on the very sequences of its target;
- together they take at most the recipe's fraction of what the weights and buffers of both leave;
- that holds whichever model loads first, and if both load at once.

With T tokens, k bytes a token and A bytes that are left for caches: T (k_target + k_draft) <= fraction * A, and
the fraction of each model is what T tokens are of the memory that it finds when it loads last, T k / (A - T k_other).
Loading first it finds more, and the cap holds it at T.

The rule is the C++ runtime's: tokens = min(cap, fraction * free / bytes of a token), the smallest of all ranks, rounded
up to whole blocks (KVCacheManager::calculateMaxNumBlocks, file index ids 36938158234 and 2600970701). The cap is a
multiple of the blocks of both, so that nothing is rounded.

Assumed: sizes of weights are those of the engine files; buffers are an estimate (`contracts.engine_memory`), and no
other process uses the GPU. If more is taken than was assumed, the fraction of the model that loads last makes its cache
smaller, instead of failing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DIGITS = 10_000  # fractions are written with four decimals


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model on the GPU that both lie on, in bytes."""

    weights: int  # of the rank there
    buffers: int  # activations and communication
    kv_per_token: int  # of the rank there
    tokens_per_block: int  # pages of the KV cache


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The Triton parameters of both models."""

    tokens: int  # max_tokens_in_paged_kv_cache of both; 0: nothing is left
    target: float  # kv_cache_free_gpu_mem_fraction
    draft: float


def share_memory(available: int, target: ModelMemory, draft: ModelMemory, fraction: float) -> MemoryShares:
    """The shares of two models on one GPU.

    `available`: bytes of the GPU less what neither model can use (CUDA contexts). `fraction`: of what weights and
    buffers leave, for both caches together.

    >>> model = ModelMemory(weights=8 * 2**30, buffers=2**30, kv_per_token=2**16, tokens_per_block=32)
    >>> share_memory(38 * 2**30, model, model, 0.8)   # 20 GiB left, 16 GiB for caches, 8 GiB each
    MemoryShares(tokens=131072, target=0.6667, draft=0.6667)
    """
    left = available - sum(model.weights + model.buffers for model in (target, draft))
    block = math.lcm(target.tokens_per_block, draft.tokens_per_block)
    tokens = int(fraction * max(left, 0)) // (target.kv_per_token + draft.kv_per_token) // block * block
    return MemoryShares(
        tokens, _last(left, tokens, target, draft, fraction), _last(left, tokens, draft, target, fraction)
    )


def _last(left: int, tokens: int, model: ModelMemory, other: ModelMemory, most: float) -> float:
    """The fraction of the memory that the model finds when the other has its cache already."""
    if not tokens:
        return most
    needed = tokens * model.kv_per_token / (left - tokens * other.kv_per_token)
    return min(math.ceil(needed * _DIGITS) / _DIGITS, most)
