"""From a recipe and the engines that were built for it to the values of their Triton models.

Engine and recipe must agree before anything is packaged: what the backend is told to do at run time (reuse of the KV
cache, chunked context, draft tokens) it can only do with an engine that was built for it, and the builder turns some
of that off by itself (`paged context FMHA` with a KV cache that the weights' format does not go with).

A draft and its target share the memory of one GPU.

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
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.contracts import engine_memory
from pipeline.contracts.inflight_batcher import DataTypes
from pipeline.errors import StageError
from pipeline.plan.parallelism import parallelism
from pipeline.recipe import Recipe
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.flags import runtime_settings
from pipeline.runtimes.tensorrt.model_repository import EngineModelSettings, TensorRTSettings
from pipeline.triton.text_models import DraftLimits

_LOGITS = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
_PADDING = 64  # what exporters round vocabularies up to


def engine_settings(
    recipe: Recipe, target: EngineFolder, draft: EngineFolder | None, gpu_bytes: int
) -> TensorRTSettings:
    """The values of the Triton models. `gpu_bytes`: memory of one GPU.

    Raises:
        StageError: Recipe and engines do not agree, or the engines do not fit on the GPU together. All faults at once.
    """
    faults = list(_disagreements(recipe, target, draft))
    if faults:
        raise StageError(f"recipe {recipe.name} and its engines disagree: " + "; ".join(faults))
    fraction = recipe.kv_cache.memory_fraction or engine_memory.default_fraction()
    shares = None if draft is None else memory_shares(recipe, target, draft, gpu_bytes)
    return settings_of(
        recipe,
        _model(target, shares.target if shares else fraction, shares),
        None if draft is None or shares is None else _model(draft, shares.draft, shares),
    )


def settings_of(
    recipe: Recipe, target: EngineModelSettings, draft: EngineModelSettings | None
) -> TensorRTSettings:
    """The values of the Triton models, around those of the engines."""
    scheduler = recipe.scheduler
    return TensorRTSettings(
        version=runtime_settings(recipe).version,
        target=target,
        draft=draft,
        max_concurrency=recipe.limits.max_concurrency,
        kv_cache_reuse=recipe.kv_cache.reuse,
        chunked_context=scheduler.chunked_context,
        policy=scheduler.policy,
        host_memory_bytes=_host_memory(recipe),
        guided_decoding=bool(recipe.guided_decoding),
        max_queue_size=scheduler.max_queue_size,
        max_queue_delay_us=scheduler.max_queue_delay_us,
        decoupled=recipe.serving.decoupled,
        prompt_log_probs=recipe.serving.prompt_log_probs,
        draft_limits=DraftLimits(
            max_draft_tokens=recipe.draft.max_draft_tokens if recipe.draft else None,
            max_input_tokens=recipe.limits.max_input_tokens,
            max_output_tokens=recipe.limits.max_output_tokens,
        ),
    )


def memory_shares(recipe: Recipe, target: EngineFolder, draft: EngineFolder, gpu_bytes: int) -> MemoryShares:
    """Shares of draft and target of the GPUs that both lie on; see the head of this file.

    Raises:
        StageError: The rest does not hold one sequence of the longest length.
    """
    runtime = runtime_settings(recipe)
    fraction = recipe.kv_cache.memory_fraction or engine_memory.default_fraction()
    models = (_memory(target), _memory(draft))
    shares = share_memory(gpu_bytes - engine_memory.other_bytes(), *models, fraction)
    longest = recipe.limits.max_sequence_tokens
    if shares.tokens < longest:
        weights = sum(model.weights for model in models) / 2**30
        raise StageError(
            f"recipe {recipe.name}: target and draft do not fit on one {runtime.gpu} together: beside {weights:.1f} "
            f"GiB of weights the KV caches hold {shares.tokens} tokens each, and one sequence may have {longest} "
            "(limits.max_input_tokens + limits.max_output_tokens); raise runtime.tensor_parallel, or lower the limits"
        )
    return shares


def _disagreements(recipe: Recipe, target: EngineFolder, draft: EngineFolder | None) -> Iterator[str]:
    yield from _engine_faults(recipe, "target", target)
    if recipe.draft is None or draft is None:
        return
    yield from _engine_faults(recipe, "draft", draft)
    proposed = recipe.draft.max_draft_tokens
    if not target.verifies_drafts or target.max_draft_len < proposed:
        yield (
            f"draft.max_draft_tokens is {proposed}, but the target's engine verifies {target.max_draft_len} "
            "(max_draft_len, with speculative_decoding_mode draft_tokens_external)"
        )
    if _padded(target.vocab_size) != _padded(draft.vocab_size):
        yield (
            f"the target's engine has a vocabulary of {target.vocab_size} tokens, the draft's of {draft.vocab_size}; "
            "token ids go from one to the other as they are, so both must have one tokenizer"
        )


def _engine_faults(recipe: Recipe, role: str, engine: EngineFolder) -> Iterator[str]:
    runtime, sizes, limits = runtime_settings(recipe), parallelism(recipe, role), recipe.limits
    if engine.version != runtime.version:
        yield f"runtime.version is {runtime.version}, but the {role}'s engine was built by {engine.version}"
    if (engine.tensor_parallel, engine.pipeline_parallel) != (sizes.tensor, sizes.pipeline):
        yield (
            f"the {role} is to be spread over tensor {sizes.tensor} x pipeline {sizes.pipeline} GPUs, but its engine "
            f"is for {engine.tensor_parallel} x {engine.pipeline_parallel}"
        )
    if engine.max_batch_size < limits.max_concurrency:
        yield (
            f"limits.max_concurrency is {limits.max_concurrency}, but the {role}'s engine takes "
            f"{engine.max_batch_size} requests at a time (max_batch_size)"
        )
    if engine.max_seq_len < limits.max_sequence_tokens:
        yield (
            f"limits allow {limits.max_sequence_tokens} tokens in a sequence, but the {role}'s engine "
            f"{engine.max_seq_len} (max_seq_len)"
        )
    if recipe.draft is not None and not recipe.scheduler.chunked_context:
        yield from _short_prompts(recipe, role, engine)
    if recipe.serving.prompt_log_probs and role == "target" and not engine.gather_context_logits:
        yield "serving.prompt_log_probs needs an engine that was built with gather_context_logits"
    if not engine.use_paged_context_fmha:
        yield from _without_paged_context(recipe, role, engine)


def _short_prompts(recipe: Recipe, role: str, engine: EngineFolder) -> Iterator[str]:
    """Rounds of a draft and its target send the answer so far as prompt. Without chunked context the runtime takes
    prompts of at most max_num_tokens (TensorRT-LLM, batch_manager/trtGptModel.h: maxInputLen)."""
    longest = recipe.limits.max_sequence_tokens - 1
    if engine.max_num_tokens < longest:
        yield (
            f"with a draft, prompts grow to {longest} tokens, but without scheduler.chunked_context the {role}'s "
            f"engine takes {engine.max_num_tokens} (max_num_tokens); turn it on, or raise limits.max_batch_tokens"
        )


def _without_paged_context(recipe: Recipe, role: str, engine: EngineFolder) -> Iterator[str]:
    """Settings of the recipe that an engine without paged context FMHA cannot serve."""
    wanted = {
        "scheduler.chunked_context": recipe.scheduler.chunked_context,
        "kv_cache.reuse": recipe.kv_cache.reuse,
        "draft": recipe.draft is not None,
    }
    keys = [key for key, is_wanted in wanted.items() if is_wanted]
    if keys:
        yield (
            f"{' and '.join(keys)} need{'s' if len(keys) == 1 else ''} paged context FMHA, but the {role}'s engine has "
            f"use_paged_context_fmha = false (weights {engine.quantization or engine.dtype}, KV cache "
            f"{engine.kv_cache_quantization or engine.dtype}: the builder turns it off for an FP8 KV cache without FP8 "
            "activations, and for INT8); set quantization.kv_cache to auto, or turn those off"
        )


def _model(engine: EngineFolder, fraction: float, shares: MemoryShares | None) -> EngineModelSettings:
    return EngineModelSettings(
        gpus=tuple(range(engine.world_size)),
        memory_fraction=fraction,
        max_kv_tokens=shares.tokens if shares else None,
        data_types=DataTypes(
            logits_datatype=_LOGITS[engine.logits_dtype],
            encoder_input_features_data_type=_TYPES[engine.dtype],
            prompt_embedding_table_data_type=_TYPES[engine.dtype],
        ),
        tokens_per_block=engine.tokens_per_block,
    )


def _memory(engine: EngineFolder) -> ModelMemory:
    """Bytes of the largest rank."""
    activations = engine_memory.activation_bytes(
        has_experts=bool(engine.experts),
        tensor_parallel=engine.tensor_parallel,
        max_num_tokens=engine.max_num_tokens,
        heads=engine.heads,
        head_size=engine.head_size,
    )
    return ModelMemory(
        weights=max(engine.rank_bytes),
        buffers=activations + engine_memory.nccl_bytes(engine.tensor_parallel),
        kv_per_token=engine_memory.kv_bytes_per_token(
            layers=engine.layers,
            kv_heads=engine.kv_heads,
            head_size=engine.head_size,
            kv_cache=(engine.kv_cache_quantization or engine.dtype).lower(),
            tensor_parallel=engine.tensor_parallel,
            pipeline_parallel=engine.pipeline_parallel,
        ),
        tokens_per_block=engine.tokens_per_block,
    )


def _host_memory(recipe: Recipe) -> int:
    """Bytes per rank: the backend gives each rank the configured amount."""
    ranks = parallelism(recipe, "target").world
    ranks += parallelism(recipe, "draft").world if recipe.draft is not None else 0
    return int(recipe.kv_cache.host_memory_gib * 2**30 / ranks)


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _PADDING) * _PADDING


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
