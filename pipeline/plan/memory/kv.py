"""What tokens cost in the KV cache of one model, on one rank."""

from __future__ import annotations

from pipeline.contracts import engine_memory
from pipeline.plan.memory.demand import ModelNeed
from pipeline.plan.memory.weights import stage_layers


def token_bytes(need: ModelNeed, stage: int = 0) -> int:
    """Keys and values of one token, in all layers of a stage."""
    return _token_bytes(need, len(stage_layers(need, stage)))


def sequence_bytes(need: ModelNeed, tokens: int, stage: int = 0) -> int:
    """Of a sequence, if layers with a window keep only what they see (`max_attention_window`, which we do not set)."""
    windows, layers = need.sizes.windows, stage_layers(need, stage)
    one = _token_bytes(need, 1)
    return sum(one * min(tokens, (windows[layer] if windows else 0) or tokens) for layer in layers)


def formula(need: ModelNeed) -> str:
    """How a token's bytes are counted, in numbers."""
    sizes, ways = need.sizes, need.split.tensor
    layers = len(stage_layers(need, 0))
    if sizes.latent is not None:
        return f"{layers} layers * ({sizes.latent.kv_rank} + {sizes.latent.rope}) of {need.kv_cache}"
    heads = f"ceil({sizes.kv_heads} / {ways})" if ways > 1 else str(sizes.kv_heads)
    return f"2 * {layers} layers * {heads} KV heads * {sizes.head_dim} of {need.kv_cache}"


def _token_bytes(need: ModelNeed, layers: int) -> int:
    sizes = need.sizes
    if sizes.latent is not None:
        return engine_memory.latent_bytes_per_token(
            layers=layers, rank=sizes.latent.kv_rank, rope=sizes.latent.rope, kv_cache=need.kv_cache
        )
    return engine_memory.kv_bytes_per_token(
        layers=layers,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_dim,
        kv_cache=need.kv_cache,
        tensor_parallel=need.split.tensor,
    )
