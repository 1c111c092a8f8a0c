"""From a recipe to the arguments of TensorRT-LLM's LLM API: pure, by version, judged by the contract.

Paths in them are relative to the folder that holds both the arguments and the checkpoints. The arguments say nothing of
quantization: the checkpoint carries it. The KV cache's format is given where the recipe names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.contracts import engine_memory, llm_args, llmapi
from pipeline.errors import InvalidInput, UserError
from pipeline.recipe import PyTorchRuntime, Recipe

CHECKPOINT, DRAFT = "checkpoint", "draft"  # folders beside the arguments
_BATCH_TOKENS = 8192  # upstream's default of max_num_tokens
_GIB = 2**30


def llm_arguments(recipe: Recipe) -> dict[str, Any]:
    """The arguments, in the order in which a reader looks for them.

    Raises:
        UserError: The version is not known, or cannot do what the recipe asks for.
    """
    runtime, limits = _runtime(recipe), recipe.limits
    llm_args.require(runtime.version)
    arguments: dict[str, Any] = {
        "model": CHECKPOINT,
        "backend": "pytorch",
        "tensor_parallel_size": runtime.tensor_parallel,
        "pipeline_parallel_size": runtime.pipeline_parallel,
    }
    if runtime.expert_parallel is not None:
        arguments["moe_expert_parallel_size"] = runtime.expert_parallel
        arguments["moe_tensor_parallel_size"] = runtime.tensor_parallel // runtime.expert_parallel
    arguments |= {
        "max_batch_size": limits.max_concurrency,
        "max_num_tokens": _batch_tokens(recipe),
        "max_seq_len": limits.max_sequence_tokens,
        "kv_cache_config": _kv_cache(recipe),
        "scheduler_config": {"capacity_scheduler_policy": recipe.scheduler.policy.upper()},
        "enable_chunked_prefill": recipe.scheduler.chunked_context,
        "cuda_graph_config": _cuda_graphs(recipe),
    }
    speculation, two_models = _speculation(recipe)
    arguments["disable_overlap_scheduler"] = _without_overlap(recipe, two_models)
    if recipe.guided_decoding:
        arguments["guided_decoding_backend"] = "xgrammar"
        if speculation is not None and not llmapi.guides_with_speculation(runtime.version):
            raise UserError(
                f"recipe {recipe.name}: guided_decoding = true: TensorRT-LLM {runtime.version} cannot hold answers to "
                "a form where tokens are proposed (remove guided_decoding or the speculation, or set runtime.version "
                "to 1.2.0 or newer)"
            )
    if speculation is not None:
        arguments["speculative_config"] = speculation
    faults = llm_args.check(runtime.version, arguments)
    if faults:
        raise InvalidInput(f"recipe {recipe.name}: arguments for TensorRT-LLM {runtime.version}", faults)
    return arguments


def draft_tokens(recipe: Recipe) -> int:
    """Tokens that are proposed in one round; 0 without speculation."""
    runtime = _runtime(recipe)
    if recipe.draft is not None:
        return recipe.draft.max_draft_tokens
    if runtime.speculation is None:
        return 0
    return (
        runtime.speculation.layers
        if runtime.speculation.method == "mtp"
        else runtime.speculation.max_draft_tokens
    )


def _runtime(recipe: Recipe) -> PyTorchRuntime:
    assert isinstance(recipe.runtime, PyTorchRuntime), "chosen by runtime.kind"
    return recipe.runtime


def _batch_tokens(recipe: Recipe) -> int:
    """One step holds a token and the proposed ones of each request, and whole prompts where they are not split."""
    limits = recipe.limits
    least = limits.max_concurrency * (draft_tokens(recipe) + 1)
    if not recipe.scheduler.chunked_context:
        least = max(least, limits.max_input_tokens)
    if limits.max_batch_tokens is None:
        return max(_BATCH_TOKENS, least)
    if limits.max_batch_tokens < least:
        raise UserError(
            f"recipe {recipe.name}: limits.max_batch_tokens = {limits.max_batch_tokens}: must be at least {least}, "
            "which is one step of limits.max_concurrency requests with the tokens that speculation proposes"
        )
    return limits.max_batch_tokens


def _kv_cache(recipe: Recipe) -> dict[str, Any]:
    fraction = recipe.kv_cache.memory_fraction
    config: dict[str, Any] = {
        # written out even where it is upstream's default since 1.2: 1.0 leaves it to the C++ runtime
        "free_gpu_memory_fraction": engine_memory.default_fraction() if fraction is None else fraction,
        "enable_block_reuse": recipe.kv_cache.reuse,
        "dtype": recipe.quantization.kv_cache,
    }
    if recipe.kv_cache.host_memory_gib:
        config["host_cache_size"] = round(recipe.kv_cache.host_memory_gib * _GIB)
    return config


def _cuda_graphs(recipe: Recipe) -> dict[str, Any] | None:
    """Graphs for batches up to all requests; batches between two sizes are padded. None turns them off."""
    if not _runtime(recipe).cuda_graphs:
        return None
    return {"max_batch_size": recipe.limits.max_concurrency, "enable_padding": True}


def _speculation(recipe: Recipe) -> tuple[dict[str, Any] | None, bool]:
    """The settings (None: no speculation), and whether two models run in turns."""
    runtime, draft = _runtime(recipe), recipe.draft
    method: str
    settings: Mapping[str, Any]
    if draft is not None:
        method, settings = draft.method, {"max_draft_len": draft.max_draft_tokens}
    elif runtime.speculation is None:
        return None, False
    elif runtime.speculation.method == "mtp":
        method, settings = "mtp", {"num_nextn_predict_layers": runtime.speculation.layers}
    else:
        method = "ngram"
        settings = {
            "max_draft_len": runtime.speculation.max_draft_tokens,
            "max_matching_ngram_size": runtime.speculation.max_matching_tokens,
        }
    way = llm_args.speculation(runtime.version, method)
    checkpoint = {way.draft_key: DRAFT} if way.draft_key is not None else {}
    return {"decoding_type": way.decoding_type, **settings, **checkpoint, **way.extra}, way.two_models


def _without_overlap(recipe: Recipe, two_models: bool) -> bool:
    wanted = _runtime(recipe).overlap_scheduler
    if two_models and wanted:
        raise UserError(
            f"recipe {recipe.name}: runtime.overlap_scheduler = true: TensorRT-LLM {_runtime(recipe).version} cannot "
            "overlap scheduling with a draft that runs as a model of its own, nor with n-grams "
            "(remove runtime.overlap_scheduler)"
        )
    unguided = recipe.guided_decoding is True and not llmapi.guides_with_overlap(_runtime(recipe).version)
    if unguided and wanted:
        raise UserError(
            f"recipe {recipe.name}: runtime.overlap_scheduler = true: TensorRT-LLM {_runtime(recipe).version} cannot "
            "overlap scheduling with guided decoding (remove runtime.overlap_scheduler or guided_decoding)"
        )
    return two_models or unguided or wanted is False
