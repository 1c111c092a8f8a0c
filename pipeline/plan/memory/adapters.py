"""The caches of LoRA adapters: what TensorRT-LLM sets aside on each GPU and in the host's memory, and what `cpu` holds.

TensorRT-LLM sets aside the same room for each adapter, that of one with the largest rank in all modules (the sources of
the formula are `lora_cache` in contracts/data/llmapi.yaml). A rank holds its share of each pair of matrices: B where
rows of the layer are split, A where columns are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.contracts import engine_memory, llmapi
from pipeline.models.adapter import Adapter
from pipeline.plan.memory.spec import AdapterDemand, MemoryLine, ModelSpec
from pipeline.plan.memory.tensors import rank_part

_OPTIMAL_RANK = 8  # optimal_adapter_size of PeftCacheConfig, by which pages are laid out
_QKV = ("attn_q", "attn_k", "attn_v")
_SOURCES = ("contracts/data/llmapi.yaml: lora_cache",)


def lora_targets(version: str, adapters: Iterator[Adapter]) -> list[str]:
    """List upstream's names of the kinds of layers that adapters change; queries, keys and values come together."""
    names = {llmapi.lora_module(version, module.name) for adapter in adapters for module in adapter.modules}
    known = {name for name in names if name is not None}
    return sorted(known | set(_QKV) if known & set(_QKV) else known)


def adapter_lines(demand: AdapterDemand, model: ModelSpec) -> Iterator[MemoryLine]:
    """Yield the line of a rank's adapters, if there are any that are known."""
    if not demand.known:
        return
    if demand.version is None:
        size = 4 * sum(adapter.parameters for adapter in demand.known.values())
        text = f"{len(demand.known)} adapters, rank * (inputs + outputs) of each layer in float32"
    else:
        size = cache_bytes(demand, model, demand.device)
        text = (
            f"cache of {demand.device} adapters of rank {_rank(demand)}: rank * (inputs + outputs) of each module in "
            f"{model.sizes.dtype}, all modules as large as the largest"
        )
    yield MemoryLine("weights", model.role, "adapters", size, text, _SOURCES)


def host_cache_bytes(demand: AdapterDemand, model: ModelSpec) -> int:
    """Bytes of the host's memory that the caches of all ranks take."""
    if not demand.known or demand.version is None:
        return 0
    return cache_bytes(demand, model, demand.host) * model.split.world


def cache_bytes(demand: AdapterDemand, model: ModelSpec, adapters: int) -> int:
    """Bytes of one rank's cache for a number of adapters, in whole pages."""
    assert demand.version is not None, "of TensorRT-LLM"
    targets = set(lora_targets(demand.version, iter(demand.known.values())))
    modules: dict[str, int] = {}
    for block in model.sizes.blocks:
        for weight in block.weights:
            name = llmapi.lora_module(demand.version, weight.name) if weight.quantizable else None
            if name in targets and not weight.is_expert:
                part = rank_part(weight, model.split)
                modules[name] = max(modules.get(name, 0), part.rows + part.columns)
    if not modules:
        return 0
    rank, layers, page = _rank(demand), model.sizes.layers, min(modules.values())
    slots = rank * layers * len(modules) * adapters * math.ceil(max(modules.values()) / page)
    layers_here = math.ceil(layers / model.split.pipeline)
    of_page = max(
        min(_OPTIMAL_RANK, rank) * sum(math.ceil(size / page) for size in modules.values()) * layers_here,
        math.ceil(rank * max(modules.values()) / page),
    )
    whole = math.ceil(slots / of_page) * of_page
    return whole * page * int(engine_memory.dtype_bytes(model.sizes.dtype))


def _rank(demand: AdapterDemand) -> int:
    return max(adapter.rank for adapter in demand.known.values())
