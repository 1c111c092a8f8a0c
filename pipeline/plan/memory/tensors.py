"""The weights of a decoder as ranks hold them; their bytes, and those of tokens and sequences in its KV cache.

From config.json alone, so that it is known before anything is downloaded (`pipeline.models.sizes`). Towers for images
are counted as weights that every rank holds whole. Layers that predict further tokens are counted where speculation
loads them. Layers that see a window keep all tokens unless the server is told otherwise, or bounds them by itself
(`ModelSpec.windows`). With attention data parallelism a rank shares nothing but routed experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.contracts import engine_memory
from pipeline.models.blocks import KINDS, STATE_BYTES, Cache, Kind, WeightTensor
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.spec import MemoryLine, ModelSpec
from pipeline.plan.parallelism import Parallelism


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


def rank_part(tensor: WeightTensor, split: Parallelism, vocabulary_multiple: int = 1) -> TensorPart:
    """Return the largest part of a tensor that any rank holds.

    Args:
        vocabulary_multiple: Vocabularies are padded to a multiple of it.
    """
    ways = split.shared
    if tensor.is_expert:
        copies = math.ceil(tensor.copies / split.expert)
        inner = split.expert_tensor
        rows = math.ceil(tensor.rows / inner) if tensor.split == "rows" else tensor.rows
        columns = math.ceil(tensor.columns / inner) if tensor.split == "columns" else tensor.columns
        return TensorPart(rows, columns, copies)
    match tensor.split:
        case "rows":
            return TensorPart(math.ceil(tensor.rows / ways), tensor.columns)
        case "columns":
            return TensorPart(tensor.rows, math.ceil(tensor.columns / ways))
        case "pairs":
            return TensorPart(math.ceil(tensor.heads / ways) * (tensor.rows // tensor.heads), tensor.columns)
        case "vocabulary":
            multiple = math.lcm(ways, vocabulary_multiple)
            return TensorPart(math.ceil(tensor.rows / multiple) * multiple // ways, tensor.columns)
        case _:
            return TensorPart(tensor.rows, tensor.columns, tensor.copies)


def parameter_counts(sizes: ModelSizes) -> dict[Kind, int]:
    """Count the weights that a server loads by kind, each weight once.

    >>> from pipeline.contracts.models import known_model
    >>> sum(parameter_counts(known_model("meta-llama/Llama-3.1-8B")).values())
    8030261248
    """
    counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for tensor in sizes.weights():
        counts[tensor.kind] += tensor.parameters
    return counts


def active_parameters(sizes: ModelSizes) -> int:
    """Count the weights that a token passes: a share of the experts, no rows of an embedding, no tower for images."""
    idle = ("vision", *(() if sizes.tied else ("embedding",)))
    passed = (tensor for tensor in sizes.weights() if tensor.kind not in idle)
    share = sizes.experts_per_token / sizes.experts if sizes.experts else 1.0
    return round(sum(tensor.parameters * (share if tensor.is_expert else 1) for tensor in passed))


def served_format(tensor: WeightTensor, model: ModelSpec) -> str:
    """Return the format that a tensor is served in: its published one, or what the recipe makes of linear layers."""
    if model.format == model.sizes.stored:
        return tensor.stored
    is_kept = model.sizes.stored == "mxfp4" and tensor.stored == "none"  # what is cast is MXFP4 alone
    return model.format if tensor.quantizable and not is_kept else "none"


def tensor_bytes(tensor: WeightTensor, model: ModelSpec, *, vocabulary_multiple: int = 1) -> int:
    """Bytes of the part of a tensor that a rank holds, scales included."""
    part = rank_part(tensor, model.split, vocabulary_multiple)
    if model.expert_bytes is not None and tensor.is_expert:
        return int(part.rows * part.columns * part.copies * model.expert_bytes)
    form = served_format(tensor, model)
    if _is_packed(model, tensor.kind) and form != "auto":
        assert model.packed is not None, "or it would be as it is stored"
        form = "int8_head" if _is_rounded(model, tensor.kind, form) else form
        return part.copies * engine_memory.cpu_linear_bytes(
            part.rows, part.columns, form, model.packed,
            awq_block=tensor.group or model.awq_block, dtype=model.sizes.dtype,
        )  # fmt: skip
    each = engine_memory.linear_bytes(
        part.rows, part.columns, form, awq_block=tensor.group or model.awq_block,
        dtype=model.sizes.dtype, bits=model.bits,
    )  # fmt: skip
    return each * part.copies


def alike(tensors: Iterable[WeightTensor]) -> Iterator[tuple[WeightTensor, int]]:
    """Join tensors that differ in their names alone, as those of most layers do: the first, and how many they are."""
    found: dict[tuple[object, ...], tuple[WeightTensor, int]] = {}
    for tensor in tensors:
        key = (
            tensor.kind, tensor.rows, tensor.columns, tensor.split, tensor.quantizable, tensor.copies, tensor.heads,
            tensor.stored, tensor.group,
        )  # fmt: skip
        first, count = found.get(key, (tensor, 0))
        found[key] = first, count + 1
    yield from found.values()


def weight_lines(model: ModelSpec, stage: int) -> tuple[MemoryLine, ...]:
    """List the weights of a rank by kind of tensor, in bytes, without kinds that it has nothing of.

    Args:
        stage: Pipeline stage, from 0.
    """
    bytes_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    forms: dict[str, dict[str, None]] = {kind: {} for kind in KINDS}
    is_awq = model.format in ("int4_awq", "w4a8_awq")
    multiple = engine_memory.awq_vocabulary_multiple() if is_awq else 1
    for tensor, count in alike(_held(model, stage)):
        bytes_by_kind[tensor.kind] += count * tensor_bytes(tensor, model, vocabulary_multiple=multiple)
        forms[tensor.kind][served_format(tensor, model)] = None
    sources = engine_memory.sources("weights")
    lines = tuple(
        MemoryLine("weights", model.role, kind, size, _formula(model, kind, forms[kind]), sources)
        for kind, size in bytes_by_kind.items()
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


def published_bytes_by_format(tensors: Iterable[WeightTensor], dtype: str) -> dict[str, int]:
    """Sum the bytes of published weights by format; those that are not quantized under their type."""
    sizes: dict[str, int] = {}
    for tensor, count in alike(tensors):
        each = engine_memory.linear_bytes(
            tensor.rows, tensor.columns, tensor.stored, awq_block=tensor.group or 128, dtype=dtype
        )
        form = dtype if tensor.stored == "none" else tensor.stored
        sizes[form] = sizes.get(form, 0) + each * tensor.copies * count
    return sizes


def mxfp4_padding(model: ModelSpec) -> int:
    """Bytes that experts in MXFP4 may take besides, where kernels round their sizes up; 0 for other formats."""
    multiples = engine_memory.mxfp4_multiples()
    padding = 0
    for tensor in _held(model, 0):
        if not tensor.is_expert or tensor.columns == 1 or served_format(tensor, model) != "mxfp4":
            continue
        inner, outer = (
            math.ceil(size / multiples[name]) * multiples[name]
            for name, size in zip(
                ("inner", "hidden"),
                (tensor.rows, tensor.columns) if tensor.split == "rows" else (tensor.columns, tensor.rows),
                strict=True,
            )
        )
        rows, columns = (inner, outer) if tensor.split == "rows" else (outer, inner)
        padded = WeightTensor(
            tensor.kind,
            rows,
            columns,
            tensor.split,
            True,
            tensor.copies,
            stored=tensor.stored,
            group=tensor.group,
        )
        padding += tensor_bytes(padded, model) - tensor_bytes(tensor, model)
    return padding


def stage_layers(model: ModelSpec, stage: int) -> range:
    """Indices of a stage's layers: as even as can be, the first stages hold one more, or as they are told.

    >>> from pipeline.contracts.models import known_model
    >>> from pipeline.plan.parallelism import Parallelism
    >>> model = ModelSpec("target", known_model("Qwen/Qwen3-32B"), Parallelism(pipeline=3))
    >>> [len(stage_layers(model, stage)) for stage in range(3)]
    [22, 21, 21]
    """
    if model.partition:
        first = sum(model.partition[:stage])
        return range(first, min(model.sizes.layers, first + model.partition[stage]))
    each, more = divmod(model.sizes.layers, model.split.pipeline)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stage_weights(model: ModelSpec, stage: int) -> Iterator[WeightTensor]:
    """Yield the tensors of a stage's layers."""
    for index in stage_layers(model, stage):
        yield from model.sizes.blocks[index].weights


def _held(model: ModelSpec, stage: int) -> Iterator[WeightTensor]:
    sizes = model.sizes
    if stage == 0:
        yield from sizes.first
    yield from stage_weights(model, stage)
    if stage == model.split.pipeline - 1:
        yield from sizes.last
        if sizes.tied and (model.copies_tied or stage > 0):
            yield WeightTensor("lm_head", sizes.vocab, sizes.hidden, "vocabulary")
        if model.predicts:
            yield from (tensor for tensor in sizes.draft if not tensor.name.endswith(_OF_TARGET))


# Copies that MTP layers bring along, and servers leave: they use the target's own (deepseek_v3's MTPForCausalLM).
_OF_TARGET = ("embed_tokens", "shared_head.head")


def _is_packed(model: ModelSpec, kind: str) -> bool:
    """Whether the embedded engine's kernels pack weights of a kind for themselves."""
    return model.packed is not None and kind not in ("embedding", "norms", "experts")


def _is_rounded(model: ModelSpec, kind: str, form: str) -> bool:
    return model.rounded_head and kind == "lm_head" and form == "none"


def _formula(model: ModelSpec, kind: str, forms: Iterable[str]) -> str:
    ways = model.split.tensor if kind == "experts" else model.split.shared
    spread = f", over {ways} GPUs" if ways > 1 else ", whole on each GPU" if model.split.attention_dp else ""
    quantized = [form for form in forms if form != "none"]
    if any(_is_rounded(model, kind, form) for form in forms):
        return "rows * columns in 8 bits with a scale for each 128, as the cpu engine rounds it"
    if _is_packed(model, kind) and any(engine_memory.cpu_widens(form) for form in forms):
        return f"rows * columns, as the cpu engine packs them to compute in {model.packed}"
    if kind == "experts" and model.expert_bytes is not None:
        return f"rows * columns of each layer * {model.expert_bytes:g} bytes, as the cpu engine unpacks them"
    if quantized:
        return f"rows * columns of each layer in {' and '.join(quantized)}, with its scales{spread}"
    spread = "" if kind in ("norms", "vision") else spread
    return f"rows * columns in {model.sizes.dtype}{spread}"


# The KV cache


def cache_token_bytes(cache: Cache, kv_cache: str, ways: int = 1) -> float:
    """Bytes that a layer's cache grows by with each token, on one of `ways` ranks."""
    if cache.is_bounded or not cache.numbers:
        return 0.0
    numbers = cache.numbers
    if cache.heads:
        numbers = math.ceil(cache.heads / ways) * (cache.numbers // cache.heads)
    return numbers * (cache.bytes_each or engine_memory.kv_number_bytes(kv_cache)) / cache.every


def cache_state_bytes(cache: Cache, kv_cache: str, ways: int = 1, dtype: str | None = None) -> int:
    """Bytes that a layer keeps of a sequence whatever its length, on one of `ways` ranks.

    Args:
        dtype: Type of recurrent states; None: as the checkpoint has it.
    """
    window = cache.numbers * cache.window if cache.is_bounded else 0
    head_share = math.ceil(cache.heads / ways) / cache.heads if cache.heads else 1.0
    state = cache.state
    if dtype is not None:
        state += cache.recurrent * (STATE_BYTES[dtype] - STATE_BYTES[cache.recurrent_dtype])
    return math.ceil(state * head_share + window * engine_memory.kv_number_bytes(kv_cache))


def kv_token_bytes(model: ModelSpec, stage: int = 0, length: int = 0) -> int:
    """Bytes of one token's keys and values, in all layers of a stage, on one rank.

    Args:
        length: Tokens of a sequence, over which what a window keeps of it is spread; 0: as if all were kept.
    """
    ways = model.split.shared
    return math.ceil(
        sum(
            cache_token_bytes(cache, model.kv_cache, ways) * _kept(model, index, length)
            for index, cache in _caches(model, stage)
        )
    )


def sequence_state_bytes(model: ModelSpec, stage: int = 0) -> int:
    """Bytes of one sequence's states, in all layers of a stage, on one rank."""
    return sum(
        cache_state_bytes(cache, model.kv_cache, model.split.shared, model.state_dtype)
        for _, cache in _caches(model, stage)
    )


def _kept(model: ModelSpec, index: int, length: int) -> float:
    """Share of a sequence's tokens that are kept in a layer; a window begins and ends within pages."""
    window = model.windows[index % len(model.windows)] if model.windows else 0
    if not window or not length:
        return 1.0
    blocks = math.ceil((window + model.window_margin) / model.block_tokens) + 1
    return min(1.0, blocks * model.block_tokens / length)


def _caches(model: ModelSpec, stage: int) -> Iterator[tuple[int, Cache]]:
    for index in stage_layers(model, stage):
        yield from ((index, cache) for cache in model.sizes.blocks[index].caches)
    if model.predicts and stage == model.split.pipeline - 1:
        yield from ((model.sizes.layers, cache) for cache in model.sizes.draft_caches)


def kv_formula(model: ModelSpec, stage: int = 0) -> str:
    """Write how a token's bytes are counted: "2 * 32 layers * 8 KV heads * 128 of fp8"."""
    ways, counts = model.split.shared, dict[str, int]()
    for index, cache in _caches(model, stage):
        if cache_token_bytes(cache, model.kv_cache):
            part = _cache_formula(cache, model, ways)
            window = model.windows[index % len(model.windows)] if model.windows else 0
            part += f" within {window} tokens" if window else ""
            counts[part] = counts.get(part, 0) + 1
    return " + ".join(part.replace("#", f"{count} layers") for part, count in counts.items())


def _cache_formula(cache: Cache, model: ModelSpec, ways: int) -> str:
    kind = model.kv_cache if not cache.bytes_each else f"{cache.bytes_each:g} bytes"
    if cache.heads:
        heads = f"ceil({cache.heads} / {ways})" if ways > 1 else str(cache.heads)
        size, odd = divmod(cache.numbers // cache.heads, 2)
        numbers = (
            f"2 * # * {heads} KV heads * {size}" if not odd else f"# * {heads} KV heads * {2 * size + 1}"
        )
    else:
        latent = model.sizes.latent
        is_latent = cache.kind == "latent attention" and latent is not None
        numbers = (
            f"# * ({latent.kv_rank} + {latent.rope})" if is_latent and latent else f"# * {cache.numbers}"
        )
    return f"{numbers} of {kind}" + (f" / {cache.every}" if cache.every > 1 else "")
