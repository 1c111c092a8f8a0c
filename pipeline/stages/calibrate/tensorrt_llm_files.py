"""A TensorRT-LLM checkpoint judged by its files: every tensor of every rank, its type, its shape, its values.

Names and shapes: TensorRT-LLM's checkpoint format as its 0.17 to 1.2 releases read it, with what ModelOpt's
exporter adds (vocabulary padded to 64 for AWQ, one bias and one group of scales for q, k and v together).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import Architecture, Format, TensorFiles
from pipeline.errors import StageError
from pipeline.planning.parallelism import Parallelism

ALGORITHMS = {
    Format.NONE: None,
    Format.FP8: "FP8",
    Format.INT4_AWQ: "W4A16_AWQ",
    Format.W4A8_AWQ: "W4A8_AWQ",
    Format.INT8_SQ: "W8A8_SQ_PER_CHANNEL",
    Format.NVFP4: "NVFP4",
}
_WEIGHT_TYPE = {
    Format.FP8: "F8_E4M3",
    Format.INT4_AWQ: "I8",
    Format.W4A8_AWQ: "I8",
    Format.INT8_SQ: "I8",
    Format.NVFP4: "U8",
}
_AWQ = (Format.INT4_AWQ, Format.W4A8_AWQ)
_Expected = tuple[str, tuple[str, ...], tuple[int, ...]]  # name, types, shape


@dataclass(frozen=True, slots=True)
class Layout:
    """What the files must hold."""

    architecture: Architecture
    format: Format
    group_size: int | None
    kv_cache: str
    sizes: Parallelism
    dtype: str  # "BF16" | "F16"

    @property
    def vocab(self) -> int:
        """The exporter pads it to 64 for AWQ."""
        vocab = self.architecture.vocab
        return math.ceil(vocab / 64) * 64 if self.format in _AWQ else vocab

    def tensors(self, rank: int) -> Iterator[_Expected]:
        """All tensors of a rank; those of one pipeline stage are alike, and layers count from 0 on each."""
        model, ranks = self.architecture, self.sizes.tensor
        stage, table = rank // ranks, (math.ceil(self.vocab / ranks), model.hidden)
        if stage == 0:
            yield self._plain("transformer.vocab_embedding.weight", table)
        if stage == self.sizes.pipeline - 1:
            yield self._plain("lm_head.weight", table)
            yield self._plain("transformer.ln_f.weight", (model.hidden,))
        queries, pairs = model.heads // ranks, max(model.kv_heads // ranks, 1)
        columns, inner = queries * model.head_dim, model.intermediate // ranks
        for layer in range(model.layers // self.sizes.pipeline):
            block = f"transformer.layers.{layer}."
            yield self._plain(block + "input_layernorm.weight", (model.hidden,))
            yield self._plain(block + "post_layernorm.weight", (model.hidden,))
            attention = block + "attention."
            if model.qk_norm:
                yield self._plain(attention + "q_layernorm.weight", (model.head_dim,))
                yield self._plain(attention + "k_layernorm.weight", (model.head_dim,))
            rows = (queries + 2 * pairs) * model.head_dim
            yield from self._linear(attention + "qkv", rows, model.hidden, model.qkv_bias)
            yield from self._linear(attention + "dense", model.hidden, columns, model.output_bias)
            for name in ("fc", "gate"):
                yield from self._linear(f"{block}mlp.{name}", inner, model.hidden, model.mlp_bias)
            yield from self._linear(block + "mlp.proj", model.hidden, inner, model.mlp_bias)
            if self.kv_cache == "fp8":
                for cache in ("kv", "k", "v"):
                    yield f"{attention}{cache}_cache_scaling_factor", ("F32",), (1,)

    def _plain(self, name: str, shape: tuple[int, ...]) -> _Expected:
        return name, (self.dtype,), shape

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> Iterator[_Expected]:
        form, groups = self.format, columns // self.group_size if self.group_size else 0
        if bias:
            yield self._plain(name + ".bias", (rows,))
        if form is Format.NONE:
            yield self._plain(name + ".weight", (rows, columns))
            return
        packed = {
            Format.FP8: (rows, columns),
            Format.INT8_SQ: (rows, columns),
            Format.NVFP4: (rows, columns // 2),
        }
        yield name + ".weight", (_WEIGHT_TYPE[form],), packed.get(form, (rows // 2, columns))
        if form is Format.FP8:
            yield name + ".weights_scaling_factor", ("F32",), (1,)
        elif form is Format.INT8_SQ:
            yield name + ".weights_scaling_factor", ("F32",), (rows,)
        else:
            scale_types = ("F8_E4M3", "U8") if form is Format.NVFP4 else ("F32",)
            yield name + ".weights_scaling_factor", scale_types, (rows, groups)
        if form in (Format.W4A8_AWQ, Format.NVFP4):
            yield name + ".weights_scaling_factor_2", ("F32",), (1,)
        if form is not Format.INT4_AWQ:
            yield name + ".activation_scaling_factor", ("F32",), (1,)
        if form in (*_AWQ, Format.INT8_SQ):
            yield self._plain(name + ".prequant_scaling_factor", (columns,))


def judge(directory: Path, layout: Layout) -> None:
    """StageError with everything that is missing, left over, of the wrong type or shape, or not a usable
    number.
    """
    faults = [*_file_faults(directory, layout), *_config_faults(directory, layout)]
    if not faults:
        for rank in range(layout.sizes.world):
            expected = {name: (types, shape) for name, types, shape in layout.tensors(rank)}
            faults += _rank_faults(directory, rank, expected)
    if faults:
        raise StageError(
            "\n  ".join([f"{directory} is not a TensorRT-LLM checkpoint as asked for:", *faults])
        )


def _file_faults(directory: Path, layout: Layout) -> Iterator[str]:
    wanted = {"config.json", *(f"rank{rank}.safetensors" for rank in range(layout.sizes.world))}
    found = {path.name for path in directory.iterdir()}
    yield from (f"{name} is missing" for name in sorted(wanted - found))
    yield from (f"{name} is not expected" for name in sorted(found - wanted))


def _config_faults(directory: Path, layout: Layout) -> Iterator[str]:
    path = directory / "config.json"
    if not path.exists():
        return
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    model = layout.architecture
    quantization = config.get("quantization") or {}
    mapping = config.get("mapping") or {}
    pairs = {
        "architecture": (config.get("architecture"), model.class_name),
        "dtype": (config.get("dtype"), {"BF16": "bfloat16", "F16": "float16"}[layout.dtype]),
        "num_hidden_layers": (config.get("num_hidden_layers"), model.layers),
        "num_attention_heads": (config.get("num_attention_heads"), model.heads),
        "num_key_value_heads": (config.get("num_key_value_heads"), model.kv_heads),
        "hidden_size": (config.get("hidden_size"), model.hidden),
        "head_size": (config.get("head_size"), model.head_dim),
        "intermediate_size": (config.get("intermediate_size"), model.intermediate),
        "vocab_size": (config.get("vocab_size"), layout.vocab),
        "max_position_embeddings": (config.get("max_position_embeddings"), model.max_positions),
        "norm_epsilon": (config.get("norm_epsilon"), model.norm_epsilon),
        "rotary_base": (config.get("rotary_base"), model.rope.theta),
        "position_embedding_type": (config.get("position_embedding_type"), "rope_gpt_neox"),
        "mapping.world_size": (mapping.get("world_size"), layout.sizes.world),
        "mapping.tp_size": (mapping.get("tp_size"), layout.sizes.tensor),
        "mapping.pp_size": (mapping.get("pp_size"), layout.sizes.pipeline),
        "quantization.quant_algo": (quantization.get("quant_algo"), ALGORITHMS[layout.format]),
        "quantization.kv_cache_quant_algo": (
            quantization.get("kv_cache_quant_algo"),
            "FP8" if layout.kv_cache == "fp8" else None,
        ),
        "quantization.group_size": (quantization.get("group_size"), layout.group_size),
    }
    yield from (
        f"config.json: {key} is {got!r}, not {want!r}" for key, (got, want) in pairs.items() if got != want
    )


def _rank_faults(
    directory: Path, rank: int, expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
) -> Iterator[str]:
    file = directory / f"rank{rank}.safetensors"
    tensors = TensorFiles(directory, pattern=file.name)
    for name in sorted(expected.keys() - tensors.keys()):
        yield f"{file.name}: {name} is missing"
    for name, header in tensors.headers.items():
        if name not in expected:
            yield f"{file.name}: {name} is not expected"
            continue
        types, shape = expected[name]
        if header.dtype not in types:
            yield f"{file.name}: {name} is {header.dtype}, not {types[0]}"
        if header.shape != shape and not (
            shape == (1,) and header.shape == ()
        ):  # both are read as one number
            yield f"{file.name}: {name} has shape {list(header.shape)}, not {list(shape)}"
        values = tensors[name]
        if values.dtype.kind in "iu":
            continue
        numbers = values.astype(np.float32)
        if not np.isfinite(numbers).all():
            yield f"{file.name}: {name} holds values that are not finite"
        elif name.endswith("scaling_factor") and not (numbers > 0).all():
            yield f"{file.name}: {name} holds scales that are not positive"
