"""From a recipe to the demand on memory that it makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipeline.contracts import engine_memory, llmapi
from pipeline.contracts.gpus import gpu
from pipeline.errors import UserError
from pipeline.models.adapter import Adapter
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.spec import AdapterDemand, DeploymentSpec, ModelSpec, StepLimits
from pipeline.plan.memory.tensors import kv_token_bytes
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.recipe import CpuRuntime, PyTorchRuntime, Recipe, TensorRTRuntime

# As the embedded engine chooses (runtimes/cpu/engine/processor.py).
_PRECISIONS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def deployment_spec(
    recipe: Recipe,
    sizes: Mapping[str, ModelSizes],
    steps: Mapping[str, StepLimits] | None = None,
    ram_bytes: int | None = None,
    unexplained: Mapping[str, int] | None = None,
    adapters: Mapping[str, Adapter] | None = None,
    bf16: bool | None = None,
) -> DeploymentSpec | None:
    """Work out what a recipe puts on each GPU, or into memory on `cpu`.

    Args:
        sizes: role -> model; None is returned unless all models are among them.
        steps: role -> what the runtime works out.
        unexplained: role -> weights that a checkpoint has besides those that its sizes explain.
        adapters: LoRA adapters of the recipe that are here, by name.
        ram_bytes: Memory of this machine, for `cpu`; None is returned where it is needed and not known.
        bf16: Whether its processor has bf16 arithmetic; None where that is not known, and f32 is counted.

    Raises:
        UserError: the GPU is not known, or the weights of a model cannot be counted: then nothing is said of them.
    """
    roles = (TARGET,) if recipe.draft is None else (TARGET, DRAFT)
    if any(role not in sizes for role in roles):
        return None
    obstacles = [
        text for role in roles for text in _obstacles(role, sizes[role], _format(recipe, role, sizes[role]))
    ]
    if obstacles:
        raise UserError("; ".join(obstacles))
    limits = steps or {}
    models = tuple(
        replace(
            _need(recipe, role, sizes[role], limits.get(role, StepLimits()), bool(bf16)),
            unexplained=(unexplained or {}).get(role, 0),
        )
        for role in roles
    )
    runtime, target = recipe.runtime, models[0]
    if target.partition and (
        len(target.partition) != target.split.pipeline or sum(target.partition) != target.sizes.layers
    ):
        raise UserError("runtime.llm_args.pp_partition does not share out the layers of the target")
    demand = adapter_demand(recipe, adapters or {})
    if isinstance(runtime, CpuRuntime):
        return None if ram_bytes is None else _on_cpu(recipe, runtime, models, ram_bytes, demand)
    device = gpu(runtime.gpu)
    proposed = recipe.draft.max_draft_tokens if recipe.draft is not None else 0
    own = _own(recipe, "kv_cache_config")
    return DeploymentSpec(
        device=device.name,
        capacity=device.driver_mib * 2**20,
        models=models,
        sequence_tokens=recipe.limits.max_sequence_tokens + proposed,
        concurrency=recipe.limits.max_concurrency,
        fraction=recipe.kv_cache.memory_fraction or engine_memory.default_fraction(),
        graph_sizes=_graph_sizes(recipe, models[0]),
        pool_bytes=own.get("max_gpu_total_bytes") or None,
        most_tokens=own.get("max_tokens"),
        adapters=demand,
    )


def adapter_demand(recipe: Recipe, known: Mapping[str, Adapter]) -> AdapterDemand | None:
    """Work out how many adapters are held at a time; None where a recipe has none.

    A GPU holds those that may be in one batch, and the host all, unless `lora_config` of runtime.llm_args says so.
    """
    count, runtime = len(recipe.adapters), recipe.runtime
    if not count:
        return None
    lora_config = _own(recipe, "lora_config")
    device, host = lora_config.get("max_loras"), lora_config.get("max_cpu_loras")
    return AdapterDemand(
        known={name: adapter for name, adapter in known.items() if adapter.modules and not adapter.faults},
        unknown=tuple(name for name in recipe.adapters if name not in known),
        device=device if isinstance(device, int) else min(count, recipe.limits.max_concurrency),
        host=host if isinstance(host, int) else count,
        version=runtime.version if isinstance(runtime, PyTorchRuntime) else None,
    )


def _own(recipe: Recipe, section: str) -> Mapping[str, Any]:
    """A section of the arguments that the recipe adds under upstream's names; empty without it."""
    runtime = recipe.runtime
    arguments = runtime.llm_args.get(section) if isinstance(runtime, PyTorchRuntime) else None
    return arguments if isinstance(arguments, Mapping) else {}


def _graph_sizes(recipe: Recipe, target: ModelSpec) -> tuple[int, ...]:
    """Batches of a rank that CUDA graphs are captured for; upstream leaves out those that no step has."""
    runtime = recipe.runtime
    if not isinstance(runtime, PyTorchRuntime) or not runtime.cuda_graphs:
        return ()
    if recipe.adapters and not llmapi.graphs_adapters(runtime.version):
        return ()
    most = target.split.rank_requests(recipe.limits.max_concurrency)
    if own := _own(recipe, "cuda_graph_config").get("batch_sizes"):
        return tuple(sorted({min(size, most) for size in own}))
    return engine_memory.graph_sizes(min(runtime.max_graph_batch or most, most))


def _obstacles(role: str, sizes: ModelSizes, form: str) -> Iterator[str]:
    """Parts of a model that are not understood, so that any figure would be a guess."""
    dtypes, forms = engine_memory.dtypes(), engine_memory.formats()
    if form not in forms:
        yield (
            f"the weights of the {role} are published in {form}, whose bytes are not understood; understood are "
            f"{', '.join(form for form in forms if form not in ('none', 'auto'))}"
        )
    if sizes.dtype not in dtypes:
        yield f"dtype of config.json is not known: {role}: {sizes.dtype}; known: {', '.join(dtypes)}"


def _chosen(recipe: Recipe, role: str) -> str:
    """The recipe's word for the format of a model."""
    return recipe.quantization.format if role == TARGET or recipe.draft is None else recipe.draft.quantization


def _format(recipe: Recipe, role: str, sizes: ModelSizes) -> str:
    """The format that a model is served in."""
    chosen = _chosen(recipe, role)
    return sizes.stored if chosen == "none" else chosen


def _need(recipe: Recipe, role: str, sizes: ModelSizes, limits: StepLimits, bf16: bool) -> ModelSpec:
    quantization, runtime = recipe.quantization, recipe.runtime
    own: Mapping[str, Any] = runtime.llm_args if isinstance(runtime, PyTorchRuntime) else {}
    if own.get("disable_mm_encoder"):
        sizes = replace(sizes, first=tuple(weight for weight in sizes.first if weight.kind != "vision"))
    state = _own(recipe, "kv_cache_config").get("mamba_ssm_cache_dtype", "auto")
    form, precision = _format(recipe, role, sizes), None
    kv_cache = _kv_cache(recipe, _chosen(recipe, role), sizes)
    if isinstance(runtime, CpuRuntime):
        precision = _PRECISIONS[engine_memory.cpu_precision(runtime.precision, sizes.hidden, bf16=bf16)]
        kv_cache = _PRECISIONS[engine_memory.cpu_kv_cache(runtime.precision, sizes.hidden, bf16=bf16)]
    return ModelSpec(
        role=role,
        sizes=sizes,
        split=parallelism(recipe, role),
        format=form,
        kv_cache=kv_cache,
        step_tokens=limits.step_tokens,
        block_tokens=limits.block_tokens,
        awq_block=quantization.awq_block_size,
        bits=quantization.auto.effective_bits if quantization.auto is not None else None,
        expert_bytes=engine_memory.cpu_expert_bytes(form) if isinstance(runtime, CpuRuntime) else None,
        packed=precision,
        # As `PagedModel` decides it: where keys and values are held in f16 for want of bf16.
        rounded_head=precision == "float32" and kv_cache == "float16" and engine_memory.cpu_packs_twice(form),
        copies_tied=isinstance(runtime, TensorRTRuntime | CpuRuntime),
        predicts=role == TARGET and _predicts(recipe),
        partition=tuple(own.get("pp_partition") or ()),
        windows=_windows(recipe, role, sizes),
        window_margin=_cpu_margin(recipe) if isinstance(runtime, CpuRuntime) else 0,
        state_dtype=None if state == "auto" else state,
    )


def _predicts(recipe: Recipe) -> bool:
    """Whether the checkpoint's own layers propose tokens (MTP)."""
    runtime = recipe.runtime
    if not isinstance(runtime, PyTorchRuntime):
        return False
    way = runtime.speculation.method if runtime.speculation is not None else None
    return way == "mtp" or _own(recipe, "speculative_config").get("decoding_type") == "MTP"


def _windows(recipe: Recipe, role: str, sizes: ModelSizes) -> tuple[int, ...]:
    """Tokens that the KV cache keeps in each layer, 0 for all: as told, or as the release derives them; (): all.

    Upstream derives them for targets of which some layers see one window and the others all, `cpu` always.
    """
    own, runtime = _own(recipe, "kv_cache_config"), recipe.runtime
    if attention_windows := own.get("max_attention_window"):
        return tuple(
            0 if window >= recipe.limits.max_sequence_tokens else window for window in attention_windows
        )
    windows = tuple(
        max((cache.window for cache in block.caches if cache.kind == "sliding window"), default=0)
        for block in sizes.blocks
    )
    if isinstance(runtime, CpuRuntime):
        longest = recipe.limits.max_sequence_tokens
        return tuple(0 if window >= longest else window for window in windows) if any(windows) else ()
    derives = isinstance(runtime, PyTorchRuntime) and engine_memory.derives_windows(runtime.version)
    if not derives or role != TARGET or own.get("use_kv_cache_manager_v2") is False:
        return ()
    return windows if len({*windows} - {0}) == 1 and 0 in windows else ()


def _cpu_margin(recipe: Recipe) -> int:
    """Tokens that a sequence keeps besides its window, as the engine's `CacheLayout` counts them.

    Drafts that may be rejected, a block that the window ends in, and its part of the tokens of a step.
    """
    limits, drafts = recipe.limits, recipe.draft.max_draft_tokens if recipe.draft is not None else 0
    step = max(
        limits.max_batch_tokens or engine_memory.cpu_step_tokens(), limits.max_concurrency * (1 + drafts)
    )
    return drafts + StepLimits().block_tokens - 2 + math.ceil(step / limits.max_concurrency)


def _kv_cache(recipe: Recipe, form: str, sizes: ModelSizes) -> str:
    """An engine takes the type from its calibrated checkpoint; the LLM API is told, or follows the published one."""
    kv_format = recipe.quantization.kv_cache
    if kv_format == "auto" and isinstance(recipe.runtime, PyTorchRuntime):
        return sizes.kv_cache or sizes.dtype
    quantized = form != "none" or isinstance(recipe.runtime, PyTorchRuntime)
    return kv_format if quantized and kv_format != "auto" else sizes.dtype


def _on_cpu(
    recipe: Recipe,
    runtime: CpuRuntime,
    models: tuple[ModelSpec, ...],
    ram_bytes: int,
    adapters: AdapterDemand | None,
) -> DeploymentSpec:
    """The embedded engine has a pool of a size of its own: the recipe's, or what the limits need up to a bound."""
    limits = recipe.limits
    longest = limits.max_sequence_tokens
    block = sum(kv_token_bytes(model, length=longest) * model.block_tokens for model in models)
    enough = limits.max_concurrency * math.ceil(longest / models[0].block_tokens)
    pool = min(enough * block, engine_memory.cpu_pool_bytes() // block * block)
    return DeploymentSpec(
        device="this machine",
        capacity=ram_bytes,
        models=models,
        sequence_tokens=longest,
        concurrency=limits.max_concurrency,
        pool_bytes=pool if runtime.kv_cache_mib is None else runtime.kv_cache_mib * 2**20,
        is_gpu=False,
        adapters=adapters,
    )
