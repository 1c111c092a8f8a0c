"""The weights of a decoder, matrix by matrix; what one rank holds of each; their bytes, and those of tokens in its KV
cache.

From sizes alone, so that it is known before anything is downloaded; of the families that `pipeline.models.sizes` reads
it is exact (tests/plan/memory compares it with headers of checkpoints and with published counts). Not counted:
vision towers, multi-token prediction layers, and whatever else a checkpoint may bring along.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.contracts import engine_memory
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.spec import MemoryLine, ModelSpec
from pipeline.plan.parallelism import Parallelism

Kind = Literal["embedding", "attention", "mlp", "experts", "lm_head", "norms"]
KINDS: tuple[Kind, ...] = ("embedding", "attention", "mlp", "experts", "lm_head", "norms")
# How ranks share a matrix [rows, columns] = [outputs, inputs]:
#   rows, columns   evenly, the last ones padded
#   pairs           rows by whole KV heads, each copied where there are more ranks than heads
#   vocabulary      rows, padded to a multiple of the ranks
#   copy            every rank holds all of it
SplitKind = Literal["rows", "columns", "pairs", "vocabulary", "copy"]


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A matrix, or with one column a vector; `copies` of it lie in each place (experts)."""

    kind: Kind
    rows: int
    columns: int
    split: SplitKind = "copy"
    quantizable: bool = False
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return self.rows * self.columns * self.copies

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the routed experts, of which a token passes a few."""
        return self.kind == "experts" and self.copies > 1

    def format(self, chosen: str) -> str:
        """Return the format that it is stored in where the model's is `chosen`."""
        keeps = not self.quantizable or (engine_memory.is_experts_only(chosen) and not self.is_expert)
        return "none" if keeps else chosen


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a tensor that one rank holds."""

    rows: int
    columns: int
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return self.rows * self.columns * self.copies


def rank_part(
    tensor: WeightTensor, sizes: ModelSizes, split: Parallelism, vocabulary_multiple: int = 1
) -> TensorPart:
    """Return the largest part of a tensor that any rank holds.

    Args:
        vocabulary_multiple: Vocabularies are padded to a multiple of it.
    """
    ways = split.tensor
    if tensor.is_expert:
        held = math.ceil(tensor.copies / split.expert)
        inner = math.ceil(ways / split.expert)
        rows = math.ceil(tensor.rows / inner) if tensor.split == "rows" else tensor.rows
        columns = math.ceil(tensor.columns / inner) if tensor.split == "columns" else tensor.columns
        return TensorPart(rows, columns, held)
    match tensor.split:
        case "rows":
            return TensorPart(math.ceil(tensor.rows / ways), tensor.columns)
        case "columns":
            return TensorPart(tensor.rows, math.ceil(tensor.columns / ways))
        case "pairs":
            return TensorPart(math.ceil(sizes.kv_heads / ways) * sizes.head_dim, tensor.columns)
        case "vocabulary":
            multiple = math.lcm(ways, vocabulary_multiple)
            return TensorPart(math.ceil(tensor.rows / multiple) * multiple // ways, tensor.columns)
        case _:
            return TensorPart(tensor.rows, tensor.columns, tensor.copies)


def embedding_tensors(sizes: ModelSizes) -> Iterator[WeightTensor]:
    """Yield what the first stage of a pipeline holds besides its layers."""
    if not is_eagle_head(sizes):
        yield WeightTensor("embedding", sizes.vocab, sizes.hidden, "vocabulary")


def output_tensors(sizes: ModelSizes) -> Iterator[WeightTensor]:
    """Yield what the last stage holds besides its layers; without the projection where it is the embedding."""
    yield WeightTensor("norms", sizes.hidden, 1)
    if not sizes.tied:
        yield WeightTensor("lm_head", sizes.draft_vocab or sizes.vocab, sizes.hidden, "vocabulary")


def layer_tensors(sizes: ModelSizes, index: int) -> Iterator[WeightTensor]:
    """Yield the tensors of one layer."""
    yield from _latent_attention(sizes) if sizes.latent is not None else _attention(sizes)
    if sizes.experts and index >= sizes.dense_layers:
        yield from _experts(sizes)
    else:
        yield from _feed_forward(sizes, sizes.dense_intermediate if sizes.experts else sizes.intermediate)
    yield WeightTensor("norms", sizes.hidden, 1, copies=sizes.layer_norms)
    if sizes.qk_norm:
        yield WeightTensor("norms", sizes.head_dim, 1, copies=2)
    if is_eagle_head(sizes):
        yield WeightTensor("norms", sizes.hidden, 1)  # over the target's hidden states
        yield WeightTensor(
            "attention", sizes.hidden, 3 * sizes.hidden
        )  # joins those of three layers of the target


def layer_kinds(sizes: ModelSizes, layers: range) -> Counter[int]:
    """Count the layers that are alike, those with experts and those without: index of one of a kind -> how many."""
    return Counter(0 if index < sizes.dense_layers else sizes.dense_layers for index in layers)


def parameter_counts(sizes: ModelSizes) -> dict[Kind, int]:
    """Count the weights of a whole model by kind, each weight once.

    >>> from pipeline.contracts.models import known_model
    >>> sum(parameter_counts(known_model("meta-llama/Llama-3.1-8B")).values())
    8030261248
    """
    found: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for tensor in (*embedding_tensors(sizes), *output_tensors(sizes)):
        found[tensor.kind] += tensor.parameters
    for index, count in layer_kinds(sizes, range(sizes.layers)).items():
        for tensor in layer_tensors(sizes, index):
            found[tensor.kind] += count * tensor.parameters
    return found


def is_eagle_head(sizes: ModelSizes) -> bool:
    """Whether it is an Eagle-3 head: it uses its target's embedding and reads its hidden states."""
    return "Eagle3" in sizes.architecture


def _attention(sizes: ModelSizes) -> Iterator[WeightTensor]:
    queries, pairs = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    inputs = sizes.hidden * (2 if is_eagle_head(sizes) else 1)
    yield WeightTensor("attention", queries, inputs, "rows", quantizable=True)
    for _ in ("k", "v"):
        yield WeightTensor("attention", pairs, inputs, "pairs", quantizable=True)
    yield WeightTensor("attention", sizes.hidden, queries, "columns", quantizable=True)
    if sizes.qkv_bias:
        yield WeightTensor("attention", queries, 1, "rows")
        for _ in ("k", "v"):
            yield WeightTensor("attention", pairs, 1, "pairs")
    if sizes.output_bias:
        yield WeightTensor("attention", sizes.hidden, 1)
    if sizes.sinks:
        yield WeightTensor("attention", sizes.heads, 1, "rows")


def _latent_attention(sizes: ModelSizes) -> Iterator[WeightTensor]:
    latent = sizes.latent
    assert latent is not None, "the caller looked"
    queries = sizes.heads * (latent.nope + latent.rope)
    if latent.query_rank:
        yield WeightTensor("attention", latent.query_rank, sizes.hidden, quantizable=True)
        yield WeightTensor("norms", latent.query_rank, 1)
    yield WeightTensor("attention", queries, latent.query_rank or sizes.hidden, "rows", quantizable=True)
    yield WeightTensor("attention", latent.kv_rank + latent.rope, sizes.hidden, quantizable=True)
    yield WeightTensor("norms", latent.kv_rank, 1)
    expanded = sizes.heads * (latent.nope + latent.value)
    yield WeightTensor("attention", expanded, latent.kv_rank, "rows", quantizable=True)
    yield WeightTensor("attention", sizes.hidden, sizes.heads * latent.value, "columns", quantizable=True)


def _feed_forward(sizes: ModelSizes, inner: int, kind: Kind = "mlp") -> Iterator[WeightTensor]:
    for _ in ("gate", "up"):
        yield WeightTensor(kind, inner, sizes.hidden, "rows", quantizable=True)
    yield WeightTensor(kind, sizes.hidden, inner, "columns", quantizable=True)
    if sizes.mlp_bias:
        for _ in ("gate", "up"):
            yield WeightTensor(kind, inner, 1, "rows")
        yield WeightTensor(kind, sizes.hidden, 1)


def _experts(sizes: ModelSizes) -> Iterator[WeightTensor]:
    inner, hidden = sizes.intermediate, sizes.hidden
    yield WeightTensor("experts", sizes.experts, hidden)  # the router keeps its precision
    for _ in ("gate", "up"):
        yield WeightTensor("experts", inner, hidden, "rows", quantizable=True, copies=sizes.experts)
    yield WeightTensor("experts", hidden, inner, "columns", quantizable=True, copies=sizes.experts)
    if sizes.shared_intermediate:
        yield from _feed_forward(sizes, sizes.shared_intermediate, "experts")
    if sizes.shared_gate:
        yield WeightTensor("experts", 1, hidden)
    if sizes.expert_bias:
        yield WeightTensor("experts", sizes.experts, 1)
        yield WeightTensor("experts", 2 * inner, 1, "rows", copies=sizes.experts)
        yield WeightTensor("experts", hidden, 1, copies=sizes.experts)
    if sizes.score_bias:
        yield WeightTensor("experts", sizes.experts, 1)


def weight_lines(model: ModelSpec, stage: int) -> tuple[MemoryLine, ...]:
    """List the weights of a rank by kind of tensor, in bytes, without kinds that it has nothing of.

    Args:
        stage: Pipeline stage, from 0.
    """
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    for tensor, count in _held(model, stage):
        held[tensor.kind] += count * _bytes(tensor, model)
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
        sum(count * _bytes(tensor, one) for tensor, count in _held(one, 0) if tensor.is_expert)
        for one in (padded, model)
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


def _held(model: ModelSpec, stage: int) -> Iterator[tuple[WeightTensor, int]]:
    """Yield each tensor of a stage with its count: layers of a kind are alike."""
    sizes = model.sizes
    if stage == 0:
        yield from ((tensor, 1) for tensor in embedding_tensors(sizes))
    for index, count in layer_kinds(sizes, stage_layers(model, stage)).items():
        yield from ((tensor, count) for tensor in layer_tensors(sizes, index))
    if stage == model.split.pipeline - 1:
        yield from ((tensor, 1) for tensor in output_tensors(sizes))
        if sizes.tied and (model.copies_tied or stage > 0):
            yield WeightTensor("lm_head", sizes.vocab, sizes.hidden, "vocabulary"), 1


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
