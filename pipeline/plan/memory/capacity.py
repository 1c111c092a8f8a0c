"""From a demand to what fits: the memory of every rank, and the tokens and sequences that the KV caches hold.

All ranks of all models work on the same sequences, so the smallest rank decides how many tokens there are. Draft and
target share what weights and buffers of both leave (`runtimes.tensorrt.triton_settings` turns that into fractions for
engines that load one after the other).

Estimates: capacities are those that drivers report; the constants of `contracts/data/engine_memory.yaml` were measured
by others on the PyTorch backend, and are too large rather than too small for engines. `accuracy` compares them with
published measurements.

For LoRA adapters, TensorRT-LLM sets aside the same room for each, that of one with the largest rank in all modules (the
sources of the formula are `lora_cache` in contracts/data/llmapi.yaml). A rank holds its share of each pair of matrices:
B where rows of the layer are split, A where columns are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.contracts import engine_memory, llmapi
from pipeline.models.adapter import Adapter
from pipeline.plan.memory.spec import AdapterDemand, DeploymentSpec, MemoryLine, ModelSpec
from pipeline.plan.memory.tensors import (
    kv_formula,
    kv_token_bytes,
    mxfp4_padding,
    rank_part,
    sequence_state_bytes,
    weight_lines,
)

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


Stages = tuple[tuple[str, int], ...]  # that a rank holds: role, and stage of that model


@dataclass(frozen=True, slots=True)
class _LoadedRank:
    """A rank before its KV caches."""

    index: int
    stages: Stages
    lines: tuple[MemoryLine, ...]  # in load order
    token_bytes: dict[str, int]  # role -> of one token
    pool: int  # bytes that KV caches of this rank may take together; negative: weights and buffers do not fit

    @property
    def used(self) -> int:
        return sum(line.bytes for line in self.lines)


def _load_ranks(spec: DeploymentSpec) -> list[_LoadedRank]:
    """All ranks, of which those that hold the same stages of the same models are alike."""
    alike: dict[Stages, _LoadedRank] = {}
    ranks: list[_LoadedRank] = []
    for index in range(spec.ranks):
        stages = tuple(
            (model.role, index // model.split.tensor) for model in spec.models if index < model.split.world
        )
        if stages not in alike:
            alike[stages] = _load_rank(spec, index, stages)
        ranks.append(replace(alike[stages], index=index))
    return ranks


def _load_rank(spec: DeploymentSpec, index: int, stages: Stages) -> _LoadedRank:
    """Everything on a rank but its KV caches."""
    models = [model for model in spec.models if index < model.split.world]
    lines = [_runtime(spec), *(line for model in models for line in _model(model, index, spec.is_gpu))]
    if spec.adapters is not None and index < spec.models[0].split.world:
        lines += adapter_lines(spec.adapters, spec.models[0])
    lines += [line for model in models for line in _states(model, index, spec.rank_sequences)]
    left = spec.capacity - sum(line.bytes for line in lines)
    pool = spec.pool_bytes if spec.pool_bytes is not None else _share(spec, left)
    costs = {
        model.role: kv_token_bytes(model, index // model.split.tensor, spec.sequence_tokens)
        for model in models
    }
    return _LoadedRank(index, stages, tuple(lines), costs, min(pool, left))


def _cache_lines(spec: DeploymentSpec, rank: _LoadedRank, tokens: int) -> tuple[MemoryLine, ...]:
    """The KV caches of a rank that hold so many tokens, and what is taken after them."""
    models = {model.role: model for model in spec.models}
    lines = [
        MemoryLine(
            "kv_cache",
            role,
            "",
            tokens * each,
            f"{tokens} tokens * {each} bytes: {kv_formula(models[role], rank.index // models[role].split.tensor)}",
            _kv(),
        )
        for role, each in rank.token_bytes.items()
    ]
    if spec.graph_sizes:
        count, each_size = len(spec.graph_sizes), engine_memory.graph_bytes()
        text = f"at most {each_size} bytes for each of {count} batch sizes"
        sources = engine_memory.sources("cuda_graph")
        lines.append(MemoryLine("graphs", "", "CUDA graphs", count * each_size, text, sources))
    return tuple(lines)


def _states(model: ModelSpec, index: int, sequences: int) -> Iterator[MemoryLine]:
    """States of linear attention and Mamba, set aside for each sequence that may run at a time, in any stage."""
    sequences *= model.split.pipeline
    if each := sequence_state_bytes(model, index // model.split.tensor):
        text = f"{sequences} sequences * {each} bytes of states, whatever their length"
        yield MemoryLine("kv_cache", model.role, "states", sequences * each, text, _kv())


def _kv() -> tuple[str, ...]:
    return engine_memory.sources("kv_cache")


def _share(spec: DeploymentSpec, left: int) -> int:
    return math.floor(spec.fraction * left * (1 - engine_memory.kv_reserve()))


def _runtime(spec: DeploymentSpec) -> MemoryLine:
    if spec.is_gpu:
        name, text = (
            "CUDA and runtime",
            "CUDA context, kernels, buffers of the decoder: a constant, once a GPU",
        )
        return MemoryLine(
            "runtime", "", name, engine_memory.other_bytes(), text, engine_memory.sources("other_bytes")
        )
    text = "Python, OpenVINO and its kernels: a constant"
    sources = engine_memory.sources("cpu_process_bytes")
    return MemoryLine("runtime", "", "process", engine_memory.cpu_process_bytes(), text, sources)


def _model(model: ModelSpec, index: int, is_gpu: bool) -> Iterator[MemoryLine]:
    yield from weight_lines(model, index // model.split.tensor)
    if not is_gpu:
        return
    sizes, ways = model.sizes, model.split.shared
    activations = engine_memory.activation_bytes(
        has_experts=bool(sizes.experts),
        tensor_parallel=ways,
        max_num_tokens=model.step_tokens,
        heads=sizes.heads,
        head_size=sizes.head_dim,
    )
    formula = f"2 * {model.step_tokens} tokens * {sizes.heads} heads * {sizes.head_dim} * a coefficient for {ways} GPUs"
    ways = model.split.tensor
    yield MemoryLine("activations", model.role, "", activations, formula, engine_memory.sources("activation"))
    if ways > 1:
        text = f"buffers to exchange activations, a constant for {ways} GPUs"
        yield MemoryLine(
            "communication",
            model.role,
            "",
            engine_memory.nccl_bytes(ways),
            text,
            engine_memory.sources("nccl_bytes"),
        )


Verdict = Literal["fits", "fits in part", "does not fit"]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one GPU with everything on it."""

    index: int
    capacity: int
    lines: tuple[MemoryLine, ...]  # in load order

    @property
    def used(self) -> int:
        """Bytes of all lines."""
        return sum(line.bytes for line in self.lines)

    @property
    def headroom(self) -> int:
        """Bytes that nothing is planned for; negative: so many are missing."""
        return self.capacity - self.used

    def group(self, name: str, role: str | None = None) -> int:
        """Sum the bytes of a group of lines (0 without any); of one model if `role` ("target" or "draft") is given."""
        return sum(line.bytes for line in self.lines if line.group == name and role in (None, line.role))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a deployment: the lines of every rank, and the tokens that the KV caches hold."""

    spec: DeploymentSpec
    ranks: tuple[RankMemory, ...]
    tokens: (
        int  # that the KV cache of each model holds; with attention data parallelism, on each rank of a stage
    )
    block_tokens: int
    fullest: tuple[int, ...] = ()  # ranks with room for the fewest tokens, which decide how many there are

    @property
    def blocks(self) -> int:
        """Whole pages of the KV cache."""
        return self.tokens // self.block_tokens

    @property
    def sequences(self) -> int:
        """Requests at the recipe's lengths that are held from beginning to end: the largest safe concurrency."""
        each = math.ceil(self.spec.sequence_tokens / self.block_tokens)
        return self.blocks // each * self.spec.request_groups

    @property
    def concurrency(self) -> int:
        """Sequences that run at a time: those that are held, up to the recipe's limit."""
        return min(self.sequences, self.spec.concurrency)

    @property
    def verdict(self) -> Verdict:
        """In part: fewer whole sequences than the recipe's concurrency, so that long requests wait for each other."""
        if self.sequences < 1:
            return "does not fit"
        return "fits" if self.sequences >= self.spec.concurrency else "fits in part"

    @property
    def tightest(self) -> RankMemory:
        """The rank with the most on it besides KV caches."""
        return max(self.ranks, key=lambda rank: rank.used - rank.group("kv_cache"))

    @property
    def fullest_named(self) -> str:
        """The ranks that decide, as a sentence names them: "GPUs 0 to 3 of 8"; empty where all hold the same."""
        first, count = self.fullest[0], len(self.fullest)
        if count == len(self.ranks) or not self.spec.is_gpu:
            return ""
        adjoin = self.fullest == tuple(range(first, first + count))
        named = f"GPU {first}" if count == 1 else f"GPUs {', '.join(map(str, self.fullest))}"
        named = f"GPUs {first} to {first + count - 1}" if adjoin and count > 1 else named
        return f"{named} of {len(self.ranks)}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what is counted without a measurement to compare it with."""
        unknown = self.spec.adapters.unknown if self.spec.adapters is not None else ()
        uncounted = (
            (f"adapters that are not here yet are not counted: {', '.join(unknown)}",) if unknown else ()
        )
        return (*(warning for model in self.spec.models for warning in _warnings(model)), *uncounted)

    @property
    def adapter_host_bytes(self) -> int:
        """Bytes of the host's memory for LoRA adapters, of all ranks."""
        return 0 if self.spec.adapters is None else host_cache_bytes(self.spec.adapters, self.spec.models[0])

    @property
    def token_bytes(self) -> dict[str, int]:
        """Role -> bytes of a token's keys and values on a rank of the first stage."""
        return {model.role: kv_token_bytes(model, 0, self.spec.sequence_tokens) for model in self.spec.models}


def _warnings(model: ModelSpec) -> Iterator[str]:
    if model.sizes.latent is not None:
        yield (
            f"{model.role}: the KV cache of multi-head latent attention is counted from its sizes; no measurement was "
            "at hand to compare it with"
        )
    if model.sizes.experts:
        gathered = (
            ", and those that gather the tokens of all GPUs are not counted"
            if model.split.attention_dp
            else ""
        )
        yield (
            f"{model.role}: buffers of models with experts are estimated{gathered}; no measurement was at hand to "
            "compare them with"
        )
    padding = mxfp4_padding(model) if model.expert_bytes is None else 0
    if padding:
        yield (
            f"{model.role}: kernels may round the sizes of experts in MXFP4 up, which takes up to "
            f"{padding / 2**30:.1f} GiB more on a GPU"
        )


def plan_memory(spec: DeploymentSpec) -> MemoryPlan:
    """Work out the memory of every rank, and how many tokens and sequences the KV caches hold.

    Returns:
        The plan; a deployment whose weights do not fit has a negative `headroom` and no tokens.
    """
    loaded = _load_ranks(spec)
    block = math.lcm(*(model.block_tokens for model in spec.models))
    holding = [
        rank for rank in loaded if any(rank.token_bytes.values())
    ]  # stages beyond the layers hold none
    fewest = min(_tokens(rank) for rank in holding)
    tokens = max(0, fewest if spec.most_tokens is None else min(fewest, spec.most_tokens)) // block * block
    alike = {rank.stages: rank for rank in loaded}
    caches = {stages: _cache_lines(spec, rank, tokens) for stages, rank in alike.items()}
    ranks = tuple(
        RankMemory(rank.index, spec.capacity, (*rank.lines, *caches[rank.stages])) for rank in loaded
    )
    least = min(rank.pool for rank in holding)
    # Where weights and buffers do not fit, those that lack the most.
    fullest = tuple(
        rank.index
        for rank in holding
        if (rank.pool == least if least < 0 else _tokens(rank) // block == fewest // block)
    )
    return MemoryPlan(spec, ranks, tokens, block, fullest)


def _tokens(rank: _LoadedRank) -> int:
    return rank.pool // sum(rank.token_bytes.values())
