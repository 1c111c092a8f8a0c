"""Weights of one model on one rank, by kind of tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pipeline.contracts import engine_memory
from pipeline.plan.memory.demand import ModelNeed
from pipeline.plan.memory.line import Line
from pipeline.plan.memory.tensors import KINDS, Tensor, embedding, layer, output, part


def weight_lines(need: ModelNeed, stage: int) -> tuple[Line, ...]:
    """Those of a rank in a stage of the pipeline (0: the first), without kinds that it has nothing of."""
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    for tensor in _held(need, stage):
        held[tensor.kind] += _bytes(tensor, need)
    sources = engine_memory.sources("weights")
    lines = tuple(
        Line("weights", need.role, kind, size, _formula(need, kind), sources)
        for kind, size in held.items()
        if size
    )
    if need.unexplained and stage == 0:
        size = need.unexplained * engine_memory.dtype_bytes(need.sizes.dtype)
        text = f"{need.unexplained} weights of the checkpoint that its config does not explain, whole on each rank"
        lines += (Line("weights", need.role, "others", size, text, ("headers of the checkpoint's files",)),)
    return lines


def weight_bytes(need: ModelNeed, stage: int = 0) -> int:
    """All of them."""
    return sum(line.bytes for line in weight_lines(need, stage))


def mxfp4_padding(need: ModelNeed, stage: int = 0) -> int:
    """Bytes that experts in MXFP4 may take besides, where kernels round their sizes up; 0 for other formats."""
    if need.format != "mxfp4":
        return 0
    multiples = engine_memory.mxfp4_multiples()
    hidden, inner = (
        math.ceil(size / multiples[name]) * multiples[name]
        for name, size in (("hidden", need.sizes.hidden), ("inner", need.sizes.intermediate))
    )
    padded = replace(need, sizes=replace(need.sizes, hidden=hidden, intermediate=inner))
    experts = [
        sum(_bytes(tensor, one) for tensor in _held(one, stage) if tensor.is_expert) for one in (padded, need)
    ]
    return experts[0] - experts[1]


def stage_layers(need: ModelNeed, stage: int) -> range:
    """The layers of a stage: as even as can be, the first stages hold one more.

    >>> from pipeline.contracts.models import known_model
    >>> from pipeline.plan.parallelism import Parallelism
    >>> model = ModelNeed("target", known_model("Qwen/Qwen3-32B"), Parallelism(pipeline=3))
    >>> [len(stage_layers(model, stage)) for stage in range(3)]
    [22, 21, 21]
    """
    each, more = divmod(need.sizes.layers, need.split.pipeline)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def _held(need: ModelNeed, stage: int) -> Iterator[Tensor]:
    sizes = need.sizes
    if stage == 0:
        yield from embedding(sizes)
    for index in stage_layers(need, stage):
        yield from layer(sizes, index)
    if stage == need.split.pipeline - 1:
        yield from output(sizes)
        if sizes.tied and (need.copies_tied or stage > 0):
            yield Tensor("lm_head", sizes.vocab, sizes.hidden, "vocabulary")


def _bytes(tensor: Tensor, need: ModelNeed) -> int:
    form = tensor.format(need.format)
    is_awq = need.format in ("int4_awq", "w4a8_awq")
    held = part(tensor, need.sizes, need.split, engine_memory.awq_vocabulary_multiple() if is_awq else 1)
    each = engine_memory.linear_bytes(
        held.rows, held.columns, form, awq_block=need.awq_block, dtype=need.sizes.dtype, bits=need.bits
    )
    return each * held.copies


def _formula(need: ModelNeed, kind: str) -> str:
    spread = f", over {need.split.tensor} GPUs" if need.split.tensor > 1 else ""
    only_experts = engine_memory.is_experts_only(need.format)
    if need.format != "none" and kind in (("experts",) if only_experts else ("attention", "mlp", "experts")):
        return f"rows * columns of each layer in {need.format}, with its scales{spread}"
    spread = "" if kind == "norms" else spread
    return f"rows * columns in {need.sizes.dtype}{spread}"
