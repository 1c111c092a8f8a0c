"""Layout of a TensorRT-LLM checkpoint: the part of each tensor on each rank. Pure: sizes in, slices out.

Names and splits are those of TensorRT-LLM 0.17 to 1.2: its converters for Llama and Mixtral (models/llama/convert.py)
and Phi-3 (models/phi3/convert.py), and ModelOpt's export. Which rank holds which expert: its mapping.py.

    attention.qkv      rows of q, k and v of the rank's heads; key-value heads are repeated where ranks outnumber them
    attention.dense    columns        mlp.proj  columns
    mlp.fc             rows of gate_proj     mlp.gate  rows of up_proj
    Mixtral            mlp.fc [experts, up over gate, hidden], mlp.proj [experts, hidden, inner], mlp.router in float32
    Phi-3              mlp.fc holds up over gate: the fused gate_up_proj with its halves swapped
    vocabulary         rows, filled up with zeros to the same number on each rank

Layers are numbered from 0 on each pipeline rank; the first has the embedding, the last the norm and the head.

Quantized weights are split in the units in which they are packed, and scales of rows or groups with them. A scale of a
whole layer lies on all ranks; weights that become one layer must have been rounded with one such scale. Of the experts,
each has a scale for its weights, and all share the largest for their inputs (layers/moe.py, MOEWeightWrapper). An FP8
cache has scales of 1 or more, as ModelOpt exports it for TensorRT-LLM (quant_utils.get_kv_cache_scaling_factor).

The other side of each slice is a tensor of the unified Hugging Face checkpoint (see checkpoint.layers), with smoothing
beside each layer and not in the norm before it. `split` goes from there to the ranks, in the formats that have no
smoothing; `RankCheckpoint` goes back, in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.contracts.checkpoint import padded_vocab
from pipeline.models import Architecture, CheckpointQuantization, Format
from pipeline.plan.parallelism import Parallelism

FLOAT32 = "F32"


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of a source tensor; of a vector, its rows."""

    tensor: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None  # None: all
    alike: tuple[str, ...] = ()  # source tensors that hold the same


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a rank: slices below each other, and zeros up to its shape."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    dtype: str | None = None  # None: that of the checkpoint

    @property
    def sources(self) -> frozenset[str]:
        """Tensors that it is made of."""
        return frozenset(name for piece in self.slices for name in (piece.tensor, *piece.alike))


@dataclass(frozen=True, slots=True)
class Scale:
    """One tensor of scales: each number is the largest of a group of source scalars.

    Weights that are held with one scale must have been rounded with it: where `same`, a group whose numbers differ is a
    fault of the source. Smaller numbers than `least` become that.
    """

    name: str
    shape: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    same: bool = True
    least: float = 0.0
    dtype: str | None = FLOAT32

    @property
    def sources(self) -> frozenset[str]:
        """Tensors that it is made of."""
        return frozenset(tensor for group in self.groups for tensor in group)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the engine, numbered as upstream numbers them: tensor-parallel ranks are neighbours."""

    number: int
    sizes: Parallelism

    @property
    def tensor(self) -> int:
        """Place within the layers."""
        return self.number % self.sizes.tensor

    @property
    def stage(self) -> int:
        """Place among the groups of layers."""
        return self.number // self.sizes.tensor

    @property
    def expert(self) -> int:
        """Group of experts."""
        return self.tensor % self.sizes.expert

    @property
    def within_expert(self) -> int:
        """Part of each expert."""
        return self.tensor // self.sizes.expert


_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Packing:
    """Storage of the weights of linear layers."""

    dtype: str | None  # None: that of the checkpoint
    rows: int = 1  # of the layer, in one that is stored
    columns: int = 1


_PACKINGS = {
    Format.NONE: _Packing(None),
    Format.FP8: _Packing("F8_E4M3"),
    Format.INT4_AWQ: _Packing("I8", rows=2),
    Format.W4A8_AWQ: _Packing("I8", rows=2),
    Format.INT8_SQ: _Packing("I8"),
    Format.NVFP4: _Packing("U8", columns=2),
}
_SMOOTHED = (Format.INT4_AWQ, Format.W4A8_AWQ, Format.INT8_SQ)
_TWO_STEPS = (Format.W4A8_AWQ, Format.NVFP4)


def parts(
    model: Architecture, rank: Rank, quantization: CheckpointQuantization | None = None
) -> Iterator[Part | Scale]:
    """All tensors of a rank, in the order of execution."""
    return _Layout(model, rank, quantization or CheckpointQuantization()).parts()


class _Layout:
    def __init__(self, model: Architecture, rank: Rank, quantization: CheckpointQuantization) -> None:
        self._model, self._rank, self._sizes = model, rank, rank.sizes
        self._form, self._group = quantization.format, quantization.group_size
        self._packing, self._kv_cache = _PACKINGS[quantization.format], quantization.kv_cache

    def parts(self) -> Iterator[Part | Scale]:
        model, stage = self._model, self._rank.stage
        each = model.layers // self._sizes.pipeline
        if stage == 0:
            yield self._vocabulary("transformer.vocab_embedding.weight", model.embedding)
        for local in range(each):
            yield from self._layer(f"model.layers.{stage * each + local}.", f"transformer.layers.{local}.")
        if stage == self._sizes.pipeline - 1:
            yield self._vector("transformer.ln_f.weight", "model.norm.weight", model.hidden)
            yield self._vocabulary("lm_head.weight", model.embedding if model.tied else "lm_head.weight")

    def _layer(self, source: str, name: str) -> Iterator[Part | Scale]:
        model = self._model
        yield self._vector(f"{name}input_layernorm.weight", f"{source}input_layernorm.weight", model.hidden)
        yield from self._attention(f"{source}self_attn.", f"{name}attention.")
        yield self._vector(
            f"{name}post_layernorm.weight", f"{source}post_attention_layernorm.weight", model.hidden
        )
        if model.experts:
            yield from self._experts(f"{source}block_sparse_moe.", f"{name}mlp.")
        elif model.fused:
            yield from self._fused_mlp(f"{source}mlp.", f"{name}mlp.")
        else:
            yield from self._mlp(f"{source}mlp.", f"{name}mlp.")

    def _attention(self, source: str, name: str) -> Iterator[Part | Scale]:
        model = self._model
        spans = self._heads()
        if model.fused:
            widths = (model.heads, model.kv_heads, model.kv_heads)
            starts = [sum(widths[:index]) * model.head_dim for index in range(3)]
            sources = [
                (f"{source}qkv_proj", _moved(span, by)) for span, by in zip(spans, starts, strict=True)
            ]
        else:
            sources = [(f"{source}{part}_proj", span) for part, span in zip("qkv", spans, strict=True)]
        yield from self._rows(f"{name}qkv", sources, bias=model.qkv_bias)
        if self._kv_cache is not None:
            key, value = f"{source}k_proj.k_scale", f"{source}v_proj.v_scale"
            for cache, group in (("k", (key,)), ("v", (value,)), ("kv", (key, value))):
                yield Scale(f"{name}{cache}_cache_scaling_factor", (1,), (group,), same=False, least=1.0)
        yield from self._columns(f"{name}dense", f"{source}o_proj", model.heads * model.head_dim)
        if model.output_bias:
            yield self._vector(f"{name}dense.bias", f"{source}o_proj.bias", model.hidden)
        if model.qk_norm:
            for part in "qk":
                yield self._vector(
                    f"{name}{part}_layernorm.weight", f"{source}{part}_norm.weight", model.head_dim
                )

    def _heads(self) -> tuple[_Span, _Span, _Span]:
        """Rows of the rank's heads in q, k and v."""
        model, ranks, at = self._model, self._sizes.tensor, self._rank.tensor
        queries = _share(model.heads * model.head_dim, ranks, at)
        pairs = _share(model.kv_heads * model.head_dim, ranks, at)
        if ranks > model.kv_heads:  # each head serves several ranks
            head = at * model.kv_heads // ranks
            pairs = (head * model.head_dim, (head + 1) * model.head_dim)
        return queries, pairs, pairs

    def _mlp(self, source: str, name: str) -> Iterator[Part | Scale]:
        model = self._model
        span = _share(model.intermediate, self._sizes.tensor, self._rank.tensor)
        for part, source_part in (("fc", "gate_proj"), ("gate", "up_proj")):
            yield from self._rows(f"{name}{part}", [(f"{source}{source_part}", span)], bias=model.mlp_bias)
        yield from self._columns(f"{name}proj", f"{source}down_proj", model.intermediate)
        if model.mlp_bias:
            yield self._vector(f"{name}proj.bias", f"{source}down_proj.bias", model.hidden)

    def _fused_mlp(self, source: str, name: str) -> Iterator[Part | Scale]:
        inner = self._model.intermediate
        gate = _share(inner, self._sizes.tensor, self._rank.tensor)
        halves = [(f"{source}gate_up_proj", span) for span in (_moved(gate, inner), gate)]  # up before gate
        yield from self._rows(f"{name}fc", halves, bias=False)
        yield from self._columns(f"{name}proj", f"{source}down_proj", inner)

    def _experts(self, source: str, name: str) -> Iterator[Part | Scale]:
        model, sizes, rank = self._model, self._sizes, self._rank
        chosen = range(*_share(model.experts, sizes.expert, rank.expert))
        inner = _share(model.intermediate, sizes.tensor // sizes.expert, rank.within_expert)
        router = Slice(f"{source}gate.weight", (0, model.experts))
        yield Part(f"{name}router.weight", (model.experts, model.hidden), (router,), FLOAT32)
        expert, kind, width = f"{source}experts.{{}}.{{}}", self._packing.dtype, inner[1] - inner[0]
        upper = [Slice(expert.format(at, f"{part}.weight"), inner) for at in chosen for part in ("w3", "w1")]
        yield Part(f"{name}fc.weight", (len(chosen), 2 * width, model.hidden), tuple(upper), kind)
        lower = [Slice(expert.format(at, "w2.weight"), (0, model.hidden), inner) for at in chosen]
        yield Part(f"{name}proj.weight", (len(chosen), model.hidden, width), tuple(lower), kind)
        if self._form is Format.NONE:
            return
        assert self._form is Format.FP8, "experts have no other formats"
        for layer, names in (("fc", ("w3", "w1")), ("proj", ("w2",))):
            groups = [tuple(expert.format(at, f"{part}.weight_scale") for part in names) for at in chosen]
            yield Scale(f"{name}{layer}.weights_scaling_factor", (len(chosen), 1), tuple(groups))
            everyone = (
                expert.format(at, f"{part}.input_scale") for at in range(model.experts) for part in names
            )
            yield Scale(f"{name}{layer}.activation_scaling_factor", (1,), (tuple(everyone),), same=False)

    def _rows(self, name: str, sources: Sequence[tuple[str, _Span]], *, bias: bool) -> Iterator[Part | Scale]:
        """A layer whose outputs are divided: rows of one or more source layers."""
        packing, hidden = self._packing, self._model.hidden
        rows = sum(high - low for _, (low, high) in sources)
        slices = tuple(Slice(f"{layer}.weight", _packed(span, packing.rows)) for layer, span in sources)
        shape = (rows // packing.rows, hidden // packing.columns)
        yield Part(f"{name}.weight", shape, slices, packing.dtype)
        if bias:
            yield Part(
                f"{name}.bias", (rows,), tuple(Slice(f"{layer}.bias", span) for layer, span in sources)
            )
        layers = tuple(dict.fromkeys(layer for layer, _ in sources))
        yield from self._layer_scales(name, layers)
        if self._form is Format.INT8_SQ or self._group:
            scales = tuple(Slice(f"{layer}.weight_scale", span) for layer, span in sources)
            yield self._weight_scales(name, rows, hidden, scales)
        if self._form in _SMOOTHED:
            first, *others = (f"{layer}.pre_quant_scale" for layer in layers)
            whole = Slice(first, (0, hidden), alike=tuple(others))
            yield Part(f"{name}.prequant_scaling_factor", (hidden,), (whole,))

    def _columns(self, name: str, source: str, columns: int) -> Iterator[Part | Scale]:
        """A layer whose inputs are divided."""
        packing, hidden = self._packing, self._model.hidden
        span = _share(columns, self._sizes.tensor, self._rank.tensor)
        rows, width = hidden // packing.rows, span[1] - span[0]
        piece = Slice(f"{source}.weight", (0, rows), _packed(span, packing.columns))
        yield Part(f"{name}.weight", (rows, width // packing.columns), (piece,), packing.dtype)
        yield from self._layer_scales(name, (source,))
        if self._form is Format.INT8_SQ or self._group:
            groups = _packed(span, self._group) if self._group else None
            scales = Slice(f"{source}.weight_scale", (0, hidden), groups)
            yield self._weight_scales(name, hidden, width, (scales,))
        if self._form in _SMOOTHED:
            smoothing = Slice(f"{source}.pre_quant_scale", span)
            yield Part(f"{name}.prequant_scaling_factor", (width,), (smoothing,))

    def _layer_scales(self, name: str, layers: Sequence[str]) -> Iterator[Scale]:
        """One number for the whole layer: of its weights (or of their second step), and of its inputs."""
        if self._form is Format.NONE:
            return
        kinds = {"weights_scaling_factor": "weight_scale"} if self._form is Format.FP8 else {}
        kinds |= {"weights_scaling_factor_2": "weight_scale_2"} if self._form in _TWO_STEPS else {}
        kinds |= {"activation_scaling_factor": "input_scale"} if self._form is not Format.INT4_AWQ else {}
        for kind, source_kind in kinds.items():
            yield Scale(f"{name}.{kind}", (1,), (tuple(f"{layer}.{source_kind}" for layer in layers),))

    def _weight_scales(self, name: str, rows: int, columns: int, slices: tuple[Slice, ...]) -> Part:
        """One number for each row, or for each group of columns in it."""
        shape = (rows, columns // self._group) if self._group else (rows,)
        kind = "F8_E4M3" if self._form is Format.NVFP4 else FLOAT32
        return Part(f"{name}.weights_scaling_factor", shape, slices, kind)

    def _vocabulary(self, name: str, tensor: str) -> Part:
        model, ranks = self._model, self._sizes.tensor
        rows = math.ceil(padded_vocab(model.vocab, self._form) / ranks)
        low = min(self._rank.tensor * rows, model.vocab)
        return Part(name, (rows, model.hidden), (Slice(tensor, (low, min(low + rows, model.vocab))),))

    def _vector(self, name: str, tensor: str, size: int) -> Part:
        return Part(name, (size,), (Slice(tensor, (0, size)),))


def _share(total: int, ranks: int, at: int) -> _Span:
    each = total // ranks
    return at * each, (at + 1) * each


def _moved(span: _Span, by: int) -> _Span:
    return span[0] + by, span[1] + by


def _packed(span: _Span, numbers: int) -> _Span:
    """A span of numbers, `numbers` of which are stored as one."""
    return span[0] // numbers, span[1] // numbers
