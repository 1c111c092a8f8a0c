"""One rank: what lies on its GPU, in the order in which it is loaded, and what is left for KV caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.contracts import engine_memory
from pipeline.plan.memory import kv
from pipeline.plan.memory.demand import Demand, ModelNeed
from pipeline.plan.memory.line import Line
from pipeline.plan.memory.weights import weight_lines


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank before its KV caches."""

    index: int
    lines: tuple[Line, ...]  # in load order
    token_bytes: dict[str, int]  # role -> of one token
    pool: int  # bytes that KV caches of this rank may take together; negative: weights and buffers do not fit

    @property
    def used(self) -> int:
        return sum(line.bytes for line in self.lines)


def load(demand: Demand, index: int) -> Loaded:
    """Everything on a rank but its KV caches."""
    held = [need for need in demand.models if index < need.split.world]
    lines = [_runtime(demand), *(line for need in held for line in _model(need, index, demand.is_gpu))]
    left = demand.capacity - sum(line.bytes for line in lines)
    pool = demand.pool_bytes if demand.pool_bytes is not None else _share(demand, left)
    costs = {need.role: kv.token_bytes(need, index // need.split.tensor) for need in held}
    return Loaded(index, tuple(lines), costs, min(pool, left))


def cache_lines(demand: Demand, rank: Loaded, tokens: int) -> tuple[Line, ...]:
    """The KV caches of a rank that hold so many tokens, and what is taken after them."""
    needs = {need.role: need for need in demand.models}
    lines = [
        Line(
            "kv_cache",
            role,
            "",
            tokens * each,
            f"{tokens} tokens * {each} bytes: {kv.formula(needs[role])}",
            _kv(),
        )
        for role, each in rank.token_bytes.items()
    ]
    if demand.graph_batch:
        count = len(engine_memory.graph_sizes(demand.graph_batch))
        size = engine_memory.graph_bytes(demand.graph_batch)
        each = f"at most {size // count} bytes for each of {count} batch sizes"
        lines.append(Line("graphs", "", "CUDA graphs", size, each, engine_memory.sources("cuda_graph")))
    return tuple(lines)


def _kv() -> tuple[str, ...]:
    return engine_memory.sources("kv_cache")


def _share(demand: Demand, left: int) -> int:
    return math.floor(demand.fraction * left * (1 - engine_memory.kv_reserve()))


def _runtime(demand: Demand) -> Line:
    if demand.is_gpu:
        name, text = (
            "CUDA and runtime",
            "CUDA context, kernels, buffers of the decoder: a constant, once a GPU",
        )
        return Line(
            "runtime", "", name, engine_memory.other_bytes(), text, engine_memory.sources("other_bytes")
        )
    text = "Python, OpenVINO and its kernels: a constant"
    sources = engine_memory.sources("cpu_process_bytes")
    return Line("runtime", "", "process", engine_memory.cpu_process_bytes(), text, sources)


def _model(need: ModelNeed, index: int, is_gpu: bool) -> Iterator[Line]:
    yield from weight_lines(need, index // need.split.tensor)
    if not is_gpu:
        return
    sizes, ways = need.sizes, need.split.tensor
    activations = engine_memory.activation_bytes(
        has_experts=bool(sizes.experts),
        tensor_parallel=ways,
        max_num_tokens=need.step_tokens,
        heads=sizes.heads,
        head_size=sizes.head_dim,
    )
    formula = f"2 * {need.step_tokens} tokens * {sizes.heads} heads * {sizes.head_dim} * a coefficient for {ways} GPUs"
    yield Line("activations", need.role, "", activations, formula, engine_memory.sources("activation"))
    if ways > 1:
        text = f"buffers to exchange activations, a constant for {ways} GPUs"
        yield Line(
            "communication",
            need.role,
            "",
            engine_memory.nccl_bytes(ways),
            text,
            engine_memory.sources("nccl_bytes"),
        )
