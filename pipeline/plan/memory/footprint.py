"""Bytes of one model on one rank: its weights by kind of tensor, and what tokens cost in its KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pipeline.contracts import engine_memory
from pipeline.plan.memory.spec import MemoryLine, ModelSpec
from pipeline.plan.memory.tensors import (
    KINDS,
    WeightTensor,
    embedding_tensors,
    layer_tensors,
    output_tensors,
    rank_part,
)


def weight_lines(model: ModelSpec, stage: int) -> tuple[MemoryLine, ...]:
    """List the weights of a rank by kind of tensor, in bytes, without kinds that it has nothing of.

    Args:
        stage: Pipeline stage, from 0.
    """
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    for tensor in _held(model, stage):
        held[tensor.kind] += _bytes(tensor, model)
    sources = engine_memory.sources("weights")
    lines = tuple(
        MemoryLine("weights", model.role, kind, size, _formula(model, kind), sources)
        for kind, size in held.items()
        if size
    )
    if model.unexplained and stage == 0:
        size = model.unexplained * engine_memory.dtype_bytes(model.sizes.dtype)
        text = f"{model.unexplained} weights of the checkpoint that its config does not explain, whole on each rank"
        lines += (
            MemoryLine("weights", model.role, "others", size, text, ("headers of the checkpoint's files",)),
        )
    return lines


def weight_bytes(model: ModelSpec, stage: int = 0) -> int:
    """Sum the bytes of all weights of a rank in a stage of the pipeline."""
    return sum(line.bytes for line in weight_lines(model, stage))


def mxfp4_padding(model: ModelSpec) -> int:
    """Bytes that experts in MXFP4 may take besides, where kernels round their sizes up; 0 for other formats."""
    if model.format != "mxfp4":
        return 0
    multiples = engine_memory.mxfp4_multiples()
    hidden, inner = (
        math.ceil(size / multiples[name]) * multiples[name]
        for name, size in (("hidden", model.sizes.hidden), ("inner", model.sizes.intermediate))
    )
    padded = replace(model, sizes=replace(model.sizes, hidden=hidden, intermediate=inner))
    experts = [
        sum(_bytes(tensor, one) for tensor in _held(one, 0) if tensor.is_expert) for one in (padded, model)
    ]
    return experts[0] - experts[1]


def stage_layers(model: ModelSpec, stage: int) -> range:
    """Indices of a stage's layers: as even as can be, the first stages hold one more.

    >>> from pipeline.contracts.models import known_model
    >>> from pipeline.plan.parallelism import Parallelism
    >>> model = ModelSpec("target", known_model("Qwen/Qwen3-32B"), Parallelism(pipeline=3))
    >>> [len(stage_layers(model, stage)) for stage in range(3)]
    [22, 21, 21]
    """
    each, more = divmod(model.sizes.layers, model.split.pipeline)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def _held(model: ModelSpec, stage: int) -> Iterator[WeightTensor]:
    sizes = model.sizes
    if stage == 0:
        yield from embedding_tensors(sizes)
    for index in stage_layers(model, stage):
        yield from layer_tensors(sizes, index)
    if stage == model.split.pipeline - 1:
        yield from output_tensors(sizes)
        if sizes.tied and (model.copies_tied or stage > 0):
            yield WeightTensor("lm_head", sizes.vocab, sizes.hidden, "vocabulary")


def _bytes(tensor: WeightTensor, model: ModelSpec) -> int:
    form = tensor.format(model.format)
    is_awq = model.format in ("int4_awq", "w4a8_awq")
    held = rank_part(
        tensor, model.sizes, model.split, engine_memory.awq_vocabulary_multiple() if is_awq else 1
    )
    each = engine_memory.linear_bytes(
        held.rows, held.columns, form, awq_block=model.awq_block, dtype=model.sizes.dtype, bits=model.bits
    )
    return each * held.copies


def _formula(model: ModelSpec, kind: str) -> str:
    spread = f", over {model.split.tensor} GPUs" if model.split.tensor > 1 else ""
    only_experts = engine_memory.is_experts_only(model.format)
    if model.format != "none" and kind in (("experts",) if only_experts else ("attention", "mlp", "experts")):
        return f"rows * columns of each layer in {model.format}, with its scales{spread}"
    spread = "" if kind == "norms" else spread
    return f"rows * columns in {model.sizes.dtype}{spread}"


def kv_token_bytes(model: ModelSpec, stage: int = 0) -> int:
    """Bytes of one token's keys and values, in all layers of a stage, on one rank."""
    sizes, layers = model.sizes, len(stage_layers(model, stage))
    if sizes.latent is not None:
        return engine_memory.latent_bytes_per_token(
            layers=layers, rank=sizes.latent.kv_rank, rope=sizes.latent.rope, kv_cache=model.kv_cache
        )
    return engine_memory.kv_bytes_per_token(
        layers=layers,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_dim,
        kv_cache=model.kv_cache,
        tensor_parallel=model.split.tensor,
    )


def kv_formula(model: ModelSpec) -> str:
    """Write how a token's bytes are counted: "2 * 32 layers * 8 KV heads * 128 of fp8"."""
    sizes, ways = model.sizes, model.split.tensor
    layers = len(stage_layers(model, 0))
    if sizes.latent is not None:
        return f"{layers} layers * ({sizes.latent.kv_rank} + {sizes.latent.rope}) of {model.kv_cache}"
    heads = f"ceil({sizes.kv_heads} / {ways})" if ways > 1 else str(sizes.kv_heads)
    return f"2 * {layers} layers * {heads} KV heads * {sizes.head_dim} of {model.kv_cache}"
