"""Artifact that `build` leaves for the `pytorch` runtime, written and then judged by reading it again.

    llm_args.yaml   arguments of the LLM API, paths relative to this folder (target only)
    checkpoint/     the unified Hugging Face checkpoint, hard links
    build.json      facts

There is no engine to build: TensorRT-LLM reads the checkpoint when the server starts. The arguments follow from the
recipe by version, and are judged by the contract. They say nothing of quantization, which the checkpoint carries; the
KV cache's format is given where the recipe names one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.contracts import engine_memory, llm_args, llmapi
from pipeline.errors import Fault, InvalidInput, StageError, UserError
from pipeline.models import CheckpointQuantization, Format, TensorFiles
from pipeline.models.adapter import Adapter
from pipeline.models.published import read_published
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.adapters import lora_targets
from pipeline.plan.memory.recipe_spec import adapter_demand
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import TARGET
from pipeline.reading import read_json
from pipeline.recipe import PyTorchRuntime, Recipe
from pipeline.store import Json
from pipeline.store.files import link_or_copy, walk

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
    if runtime.attention_dp:
        arguments["enable_attention_dp"] = True
    arguments |= {
        "max_batch_size": _rank_requests(recipe),
        "max_num_tokens": _batch_tokens(recipe),
        "max_seq_len": limits.max_sequence_tokens,
        "kv_cache_config": _kv_cache(recipe),
        "scheduler_config": {"capacity_scheduler_policy": recipe.scheduler.policy.upper()},
        "enable_chunked_prefill": recipe.scheduler.chunked_context,
        "cuda_graph_config": _cuda_graphs(recipe),
    }
    if recipe.scheduler.max_queue_delay_us:
        arguments["batch_wait_timeout_ms"] = recipe.scheduler.max_queue_delay_us / 1000
        if not llm_args.has_argument(runtime.version, "batch_wait_timeout_ms"):
            having = [
                release
                for release in llm_args.versions()
                if llm_args.has_argument(release, "batch_wait_timeout_ms")
            ]
            raise UserError(
                f"recipe {recipe.name}: scheduler.max_queue_delay_us = {recipe.scheduler.max_queue_delay_us}: "
                f"TensorRT-LLM {runtime.version} does not wait to batch requests (remove it, or set runtime.version to "
                f"one of {', '.join(having)})"
            )
    speculation, two_models = _speculation(recipe)
    arguments["disable_overlap_scheduler"] = _without_overlap(recipe, two_models)
    if recipe.guided_decoding:
        arguments["guided_decoding_backend"] = "xgrammar"
        if speculation is not None and not llmapi.guides_with_speculation(runtime.version):
            raise UserError(
                f"recipe {recipe.name}: guided_decoding = true: TensorRT-LLM {runtime.version} cannot hold answers to "
                "a form where tokens are proposed (remove guided_decoding or the speculation, or set runtime.version "
                f"to {llmapi.versions_where(llmapi.guides_with_speculation)})"
            )
    if speculation is not None:
        arguments["speculative_config"] = speculation
    faults = [*_merge(runtime.llm_args, arguments, "")]
    faults += llm_args.check(runtime.version, arguments)
    if faults:
        of_recipe = [replace(fault, key=f"runtime.llm_args.{fault.key}") for fault in faults]
        raise InvalidInput(f"recipe {recipe.name}: arguments for TensorRT-LLM {runtime.version}", of_recipe)
    return arguments


def _merge(arguments: Mapping[str, Any], into: dict[str, Any], prefix: str) -> Iterator[Fault]:
    """Add `runtime.llm_args` to the arguments that the recipe makes; yield what it may not have."""
    for name, value in arguments.items():
        path, made = prefix + name, into.get(name)
        if (reason := llm_args.decided().get(path)) is not None:
            yield Fault(f"may not be given: {reason}", key=path, value=value, fix="remove it")
        elif isinstance(value, Mapping) and (name not in into or isinstance(made, Mapping)):
            into[name] = dict(made or {})
            yield from _merge(value, into[name], f"{path}.")
        elif name in into:
            yield Fault(
                f"is {made} already, by the recipe's other fields", key=path, value=value, fix="remove it"
            )
        else:
            into[name] = value


def draft_tokens(recipe: Recipe) -> int:
    """Tokens that are proposed in one round; 0 without speculation."""
    runtime = _runtime(recipe)
    if recipe.draft is not None:
        return recipe.draft.max_draft_tokens
    if runtime.speculation is None:
        own = runtime.llm_args.get("speculative_config")
        length = own.get("max_draft_len") if isinstance(own, Mapping) else None
        return length if isinstance(length, int) else 0
    return (
        runtime.speculation.layers
        if runtime.speculation.method == "mtp"
        else runtime.speculation.max_draft_tokens
    )


def _runtime(recipe: Recipe) -> PyTorchRuntime:
    assert isinstance(recipe.runtime, PyTorchRuntime), "chosen by runtime.kind"
    return recipe.runtime


def _rank_requests(recipe: Recipe) -> int:
    """Upstream's batch is that of a rank: with attention data parallelism, ranks have requests of their own."""
    return parallelism(recipe, TARGET).rank_requests(recipe.limits.max_concurrency)


def _batch_tokens(recipe: Recipe) -> int:
    """One step holds a token and the proposed ones of each request, and whole prompts where they are not split."""
    limits = recipe.limits
    least = _rank_requests(recipe) * (draft_tokens(recipe) + 1)
    if not recipe.scheduler.chunked_context:
        least = max(least, limits.max_input_tokens)
    if limits.max_batch_tokens is None:
        return max(_BATCH_TOKENS, least)
    if limits.max_batch_tokens < least:
        raise UserError(
            f"recipe {recipe.name}: limits.max_batch_tokens = {limits.max_batch_tokens}: must be at least {least}, "
            f"which is one step of {_rank_requests(recipe)} requests with the tokens that speculation proposes"
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
        # Each rank takes as much as its setting says.
        ranks = parallelism(recipe, TARGET).world
        config["host_cache_size"] = round(recipe.kv_cache.host_memory_gib * _GIB / ranks)
    return config


def lora_arguments(recipe: Recipe, adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Arguments for the recipe's LoRA adapters, which are known when these are here; none without adapters.

    No folder of an adapter is named: then all layers and ranks would be those of this one.
    """
    demand = adapter_demand(recipe, adapters)
    if demand is None:
        return {}
    return {
        "lora_config": {
            "lora_target_modules": lora_targets(_runtime(recipe).version, iter(adapters.values())),
            "max_lora_rank": max(adapter.rank for adapter in adapters.values()),
            "max_loras": demand.device,
            "max_cpu_loras": demand.host,
        }
    }


def _cuda_graphs(recipe: Recipe) -> dict[str, Any] | None:
    """Graphs for batches up to all requests of a rank; batches between two sizes are padded. None turns them off."""
    runtime = _runtime(recipe)
    if not runtime.cuda_graphs or (recipe.adapters and not llmapi.graphs_adapters(runtime.version)):
        return None
    own = runtime.llm_args.get("cuda_graph_config")
    if isinstance(own, Mapping) and own.get("batch_sizes"):
        return {"enable_padding": True}  # upstream takes the largest of the sizes that llm_args lists
    return {"max_batch_size": runtime.max_graph_batch or _rank_requests(recipe), "enable_padding": True}


def _speculation(recipe: Recipe) -> tuple[dict[str, Any] | None, bool]:
    """The settings (None: no speculation), and whether two models run in turns."""
    runtime, draft = _runtime(recipe), recipe.draft
    method: str
    settings: dict[str, Any] = {}
    if draft is not None:
        method, length = draft.method, draft.max_draft_tokens
    elif runtime.speculation is None:
        return None, False
    elif runtime.speculation.method == "mtp":
        method, length = "mtp", runtime.speculation.layers
    else:
        method, length = "ngram", runtime.speculation.max_draft_tokens
        settings["max_matching_ngram_size"] = runtime.speculation.max_matching_tokens
    way = llm_args.speculation(runtime.version, method)
    if way.draft_key is not None:
        settings[way.draft_key] = DRAFT
    return {
        "decoding_type": way.decoding_type,
        way.length_key: length,
        **settings,
        **way.extra,
    }, way.two_models


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
            "overlap scheduling with guided decoding (remove runtime.overlap_scheduler or guided_decoding, or set "
            f"runtime.version to {llmapi.versions_where(llmapi.guides_with_overlap)})"
        )
    return two_models or unguided or wanted is False


ARGUMENTS, FACTS = "llm_args.yaml", "build.json"
CHECKPOINT = "checkpoint"
_QUANTIZATION = "hf_quant_config.json"
_OF_THE_STORE = ("manifest.json", "manifest.txt")
_HEAD = (
    "# Arguments of TensorRT-LLM {version}'s LLM API (PyTorch backend); paths begin at this file's folder.\n"
)


def write_checkpoint(source: Path, into: Path) -> dict[str, Json]:
    """Hard links to all of a checkpoint's files; how many there are, and how large."""
    folder = into / CHECKPOINT
    files = [(name, info.st_size) for name, info in walk(source) if name not in _OF_THE_STORE]
    for name, _ in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, folder / name)
    return {"files": len(files), "bytes": sum(size for _, size in files)}


def write_arguments(version: str, arguments: Mapping[str, Any], into: Path) -> None:
    """Write llm_args.yaml; a reader finds the keys in the order of the arguments."""
    text = yaml.safe_dump(dict(arguments), sort_keys=False, allow_unicode=True)
    (into / ARGUMENTS).write_text(_HEAD.format(version=version) + text, encoding="utf-8")


def read_arguments(folder: Path) -> dict[str, Any]:
    """The arguments of an artifact.

    Raises:
        StageError: There are none.
    """
    path = folder / ARGUMENTS
    if not path.is_file():
        raise StageError(f"{folder}: no {ARGUMENTS}")
    arguments = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(arguments, dict):
        raise StageError(f"{path}: holds no settings")
    return arguments


def write_facts(facts: Mapping[str, Json], into: Path) -> None:
    (into / FACTS).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def judge_arguments(version: str, meant: Mapping[str, Any], folder: Path) -> None:
    """Raises StageError if the file does not say what was meant, or TensorRT-LLM would refuse it."""
    read = read_arguments(folder)
    if read != dict(meant):
        raise StageError(f"{folder / ARGUMENTS} does not say what was meant")
    faults = llm_args.check(version, read)
    if faults:
        raise StageError(f"{folder / ARGUMENTS}: " + "; ".join(map(str, faults)))


def judge_checkpoint(folder: Path, form: str, kv_cache: str) -> tuple[str, str | None]:
    """Look at the files again: complete, and quantized as the recipe says. No weight is read.

    Args:
        form: Format of the weights, as in the recipe; `none` takes what the source is published in, `auto` any mix.
        kv_cache: As in the recipe.

    Returns:
        Formats of the weights and of the KV cache that the checkpoint names; None: it leaves the latter open.

    Raises:
        StageError: A file is missing, or the checkpoint is another than the recipe asks for.
        CheckpointError: A file of weights is damaged.
    """
    checkpoint = folder / CHECKPOINT
    if not (checkpoint / "config.json").is_file():
        raise StageError(f"{checkpoint}: no config.json")
    if any(checkpoint.glob("*.safetensors")):
        TensorFiles(checkpoint)
    elif not any(checkpoint.glob("*.bin")):
        raise StageError(f"{checkpoint}: no weights")
    if form == "none":
        return _as_published(checkpoint)
    _require_details(checkpoint)
    if form == "auto":
        return "mixed", None
    stored, expected = CheckpointQuantization.read(checkpoint), Format(form)
    if stored.format is not expected:
        raise StageError(f"{checkpoint} is {stored.format}, not {expected}")
    scaled = stored.kv_cache == "FP8"
    if scaled != (kv_cache == "fp8"):
        raise StageError(
            f"{checkpoint}: its KV cache is {stored.kv_cache or 'not quantized'}, "
            f"but quantization.kv_cache is {kv_cache}"
        )
    return str(stored.format), stored.kv_cache


def _as_published(checkpoint: Path) -> tuple[str, str | None]:
    config, beside = read_json(checkpoint / "config.json"), checkpoint / _QUANTIZATION
    details = read_json(beside) if beside.is_file() else None
    published, faults = read_published(config, details)
    if faults:
        raise StageError(f"{checkpoint}: {'; '.join(map(str, faults))}")
    sizes = ModelSizes.from_config(config, details)
    return "as published" if sizes is None else sizes.stored, published.kv_cache


def _require_details(checkpoint: Path) -> None:
    """TensorRT-LLM reads the quantization from this file."""
    if not (checkpoint / _QUANTIZATION).is_file():
        raise StageError(f"{checkpoint}: no {_QUANTIZATION}, so TensorRT-LLM would take it as unquantized")
