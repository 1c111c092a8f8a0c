"""Which part of which tensor lies on which rank of a TensorRT-LLM checkpoint. Pure: sizes in, slices out.

Names and splits are those of TensorRT-LLM 0.17 to 1.2: its converters for Llama and Mixtral (models/llama/convert.py)
and Phi-3 (models/phi3/convert.py), and ModelOpt's export. Which rank holds which expert: its mapping.py.

    attention.qkv      rows of q, k and v of the rank's heads; key-value heads are repeated where ranks outnumber them
    attention.dense    columns        mlp.proj  columns
    mlp.fc             rows of gate_proj     mlp.gate  rows of up_proj
    Mixtral            mlp.fc [experts, up over gate, hidden], mlp.proj [experts, hidden, inner], mlp.router in float32
    Phi-3              mlp.fc holds up over gate: the fused gate_up_proj with its halves swapped
    vocabulary         rows, filled up with zeros to the same number on each rank

Layers are numbered from 0 on each pipeline rank; the first has the embedding, the last the norm and the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.checkpoint import Architecture
from pipeline.planning.parallelism import Parallelism

FLOAT32 = "F32"


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of a source tensor; of a vector, its rows."""

    tensor: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None  # None: all

    @property
    def size(self) -> int:
        """Rows."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a rank: slices below each other, and zeros up to its shape."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    dtype: str | None = None  # None: that of the checkpoint


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
        """Which group of experts."""
        return self.tensor % self.sizes.expert

    @property
    def within_expert(self) -> int:
        """Which part of each expert."""
        return self.tensor // self.sizes.expert


def parts(model: Architecture, rank: Rank) -> Iterator[Part]:
    """All tensors of a rank, in the order of execution."""
    return _Layout(model, rank).parts()


class _Layout:
    def __init__(self, model: Architecture, rank: Rank) -> None:
        self._model, self._rank, self._sizes = model, rank, rank.sizes

    def parts(self) -> Iterator[Part]:
        model, stage = self._model, self._rank.stage
        each = model.layers // self._sizes.pipeline
        if stage == 0:
            yield self._vocabulary("transformer.vocab_embedding.weight", model.embedding)
        for local in range(each):
            yield from self._layer(f"model.layers.{stage * each + local}.", f"transformer.layers.{local}.")
        if stage == self._sizes.pipeline - 1:
            yield self._vector("transformer.ln_f.weight", "model.norm.weight", model.hidden)
            yield self._vocabulary("lm_head.weight", model.embedding if model.tied else "lm_head.weight")

    def _layer(self, source: str, name: str) -> Iterator[Part]:
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

    def _attention(self, source: str, name: str) -> Iterator[Part]:
        model, ranks, at = self._model, self._sizes.tensor, self._rank.tensor
        queries = _share(model.heads * model.head_dim, ranks, at)
        pairs = _share(max(model.kv_heads, ranks) * model.head_dim, ranks, at)
        if ranks > model.kv_heads:  # each head serves several ranks
            head = at * model.kv_heads // ranks
            pairs = (head * model.head_dim, (head + 1) * model.head_dim)
        spans = (queries, pairs, pairs)
        if model.fused:
            widths = (model.heads, model.kv_heads, model.kv_heads)
            starts = [sum(widths[:index]) * model.head_dim for index in range(3)]
            found = [(f"{source}qkv_proj", _moved(span, by)) for span, by in zip(spans, starts, strict=True)]
        else:
            found = [(f"{source}{part}_proj", span) for part, span in zip("qkv", spans, strict=True)]
        rows = sum(high - low for low, high in spans)
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            shape = (rows, model.hidden) if kind == "weight" else (rows,)
            yield Part(
                f"{name}qkv.{kind}", shape, tuple(Slice(f"{tensor}.{kind}", span) for tensor, span in found)
            )
        yield self._columns(f"{name}dense.weight", f"{source}o_proj.weight", model.heads * model.head_dim)
        if model.output_bias:
            yield self._vector(f"{name}dense.bias", f"{source}o_proj.bias", model.hidden)
        if model.qk_norm:
            for part in "qk":
                yield self._vector(
                    f"{name}{part}_layernorm.weight", f"{source}{part}_norm.weight", model.head_dim
                )

    def _mlp(self, source: str, name: str) -> Iterator[Part]:
        model = self._model
        span = _share(model.intermediate, self._sizes.tensor, self._rank.tensor)
        rows = span[1] - span[0]
        for ours, theirs in (("fc", "gate_proj"), ("gate", "up_proj")):
            yield Part(
                f"{name}{ours}.weight", (rows, model.hidden), (Slice(f"{source}{theirs}.weight", span),)
            )
            if model.mlp_bias:
                yield Part(f"{name}{ours}.bias", (rows,), (Slice(f"{source}{theirs}.bias", span),))
        yield self._columns(f"{name}proj.weight", f"{source}down_proj.weight", model.intermediate)
        if model.mlp_bias:
            yield self._vector(f"{name}proj.bias", f"{source}down_proj.bias", model.hidden)

    def _fused_mlp(self, source: str, name: str) -> Iterator[Part]:
        model = self._model
        gate = _share(model.intermediate, self._sizes.tensor, self._rank.tensor)
        halves = (_moved(gate, model.intermediate), gate)  # up before gate
        slices = tuple(Slice(f"{source}gate_up_proj.weight", half) for half in halves)
        yield Part(f"{name}fc.weight", (2 * (gate[1] - gate[0]), model.hidden), slices)
        yield self._columns(f"{name}proj.weight", f"{source}down_proj.weight", model.intermediate)

    def _experts(self, source: str, name: str) -> Iterator[Part]:
        model, sizes, rank = self._model, self._sizes, self._rank
        chosen = range(*_share(model.experts, sizes.expert, rank.expert))
        inner = _share(model.intermediate, sizes.tensor // sizes.expert, rank.within_expert)
        width = inner[1] - inner[0]
        router = Slice(f"{source}gate.weight", (0, model.experts))
        yield Part(f"{name}router.weight", (model.experts, model.hidden), (router,), FLOAT32)
        upper = [
            Slice(f"{source}experts.{expert}.{part}.weight", inner)
            for expert in chosen
            for part in ("w3", "w1")
        ]
        yield Part(f"{name}fc.weight", (len(chosen), 2 * width, model.hidden), tuple(upper))
        lower = [Slice(f"{source}experts.{expert}.w2.weight", (0, model.hidden), inner) for expert in chosen]
        yield Part(f"{name}proj.weight", (len(chosen), model.hidden, width), tuple(lower))

    def _vocabulary(self, name: str, tensor: str) -> Part:
        model, ranks = self._model, self._sizes.tensor
        rows = math.ceil(model.vocab / ranks)
        low = min(self._rank.tensor * rows, model.vocab)
        return Part(name, (rows, model.hidden), (Slice(tensor, (low, min(low + rows, model.vocab))),))

    def _columns(self, name: str, tensor: str, columns: int) -> Part:
        span = _share(columns, self._sizes.tensor, self._rank.tensor)
        return Part(
            name, (self._model.hidden, span[1] - span[0]), (Slice(tensor, (0, self._model.hidden), span),)
        )

    def _vector(self, name: str, tensor: str, size: int) -> Part:
        return Part(name, (size,), (Slice(tensor, (0, size)),))


def _share(total: int, ranks: int, at: int) -> tuple[int, int]:
    each = total // ranks
    return at * each, (at + 1) * each


def _moved(span: tuple[int, int], by: int) -> tuple[int, int]:
    return span[0] + by, span[1] + by
