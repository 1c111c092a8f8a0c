"""The checkpoint that trtllm-build reads: which tensors each rank holds, and what config.json says.

The facts are data (`data/checkpoint.yaml`, each with its source), for TensorRT-LLM 1.0 to 1.2 and Llama, Mistral,
Mixtral, Phi-3, Qwen2 and Qwen3. What lies on which rank, and how it is divided, is the business of stages.convert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pipeline.models import Architecture, Format
from pipeline.resources import parse_yaml


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Type and shape that a tensor of a rank must have."""

    dtypes: tuple[str, ...]  # any of them, as safetensors spells it: "BF16"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """One checkpoint: a model, how it is stored, and over how many ranks."""

    architecture: Architecture
    dtype: str  # of what is not quantized: "BF16" | "F16"
    format: Format = Format.NONE
    group_size: int | None = None
    kv_cache: str = "auto"  # "fp8": scales of keys and values are there
    tensor: int = 1  # GPUs that share each layer
    pipeline: int = 1  # groups of GPUs that share the layers
    expert: int = 1  # of the tensor-parallel GPUs, groups that hold different experts

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline

    @property
    def vocab(self) -> int:
        """`vocab_size` of config.json."""
        return padded_vocab(self.architecture.vocab, self.format)

    @property
    def algorithm(self) -> str | None:
        """`quantization.quant_algo`."""
        found: str | None = _format(self.format)["algorithm"]
        return found

    @property
    def hidden_act(self) -> str:
        """`hidden_act` of config.json."""
        model, names = self.architecture, facts()["config"]["hidden_act"]
        kind = "experts" if model.experts else "fused" if model.fused else "other"
        return str(names[kind])

    def tensors(self, rank: int) -> dict[str, ExpectedTensor]:
        """Map the name of every tensor of a rank (0 to `world` - 1) to its type and shape."""
        return dict(self._tensors(rank // self.tensor))

    def _tensors(self, stage: int) -> Iterator[tuple[str, ExpectedTensor]]:
        tensors, sizes = facts()["tensors"], self._symbols()
        places = {"first": stage == 0, "last": stage == self.pipeline - 1}
        for entry in tensors["once"]:
            if places[entry["at"]]:
                yield entry["name"], self._expected(entry, entry["shape"], sizes)
        for layer in range(self.architecture.layers // self.pipeline):
            block = f"transformer.layers.{layer}."
            plain = tensors["plain"] + (tensors["kv_cache"] if self.kv_cache == "fp8" else [])
            for entry in filter(self._holds, plain):
                yield block + entry["name"], self._expected(entry, entry["shape"], sizes)
            for entry in filter(self._holds, tensors["linears"]):
                yield from self._linear(block + entry["name"], entry, sizes)

    def _linear(
        self, name: str, entry: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, ExpectedTensor]]:
        rows, columns = sizes[entry["rows"]], sizes[entry["columns"]]
        mine = dict(sizes) | {
            "rows": rows,
            "columns": columns,
            "packed_rows": rows // 2,
            "packed_columns": columns // 2,
            "groups": columns // (self.group_size or columns),
        }
        for part in _format(self.format)["layer"]:
            shape = part["stacked" if entry.get("stacked") else "shape"]
            yield f"{name}.{part['suffix']}", self._expected(part, shape, mine)
        if "bias" in entry and getattr(self.architecture, entry["bias"]):
            yield f"{name}.bias", self._expected({}, ["rows"], mine)

    def _expected(
        self, entry: Mapping[str, Any], shape: list[str | int], sizes: Mapping[str, int]
    ) -> ExpectedTensor:
        dtypes = entry.get("dtype", self.dtype)
        chosen = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
        return ExpectedTensor(chosen, tuple(size if isinstance(size, int) else sizes[size] for size in shape))

    def _holds(self, entry: Mapping[str, Any]) -> bool:
        model = self.architecture
        have = {
            "qk_norm": model.qk_norm,
            "experts": bool(model.experts),
            "fused": model.fused,
            "dense": not model.experts,
            "separate": not model.experts and not model.fused,
        }
        return "if" not in entry or have[entry["if"]]

    def _symbols(self) -> dict[str, int]:
        model, ranks = self.architecture, self.tensor
        queries, pairs = model.heads // ranks, max(model.kv_heads // ranks, 1)
        expert_inner = model.intermediate // (ranks // self.expert)
        return {
            "hidden": model.hidden,
            "head_size": model.head_dim,
            "qkv_rows": (queries + 2 * pairs) * model.head_dim,
            "attention_columns": queries * model.head_dim,
            "vocab_rows": math.ceil(self.vocab / ranks),
            "inner": model.intermediate // ranks,
            "inner_twice": 2 * (model.intermediate // ranks),
            "all_experts": model.experts,
            "experts": model.experts // self.expert,
            "expert_inner": expert_inner,
            "expert_inner_twice": 2 * expert_inner,
        }


def padded_vocab(vocab: int, form: Format) -> int:
    """Rows of embedding and head of a model with `vocab` tokens, before they are divided: some formats pad them.

    >>> padded_vocab(501, Format.INT4_AWQ)
    512
    """
    multiple: int = _format(form).get("vocab_multiple", 1)
    return math.ceil(vocab / multiple) * multiple


def needed_keys(family: str) -> dict[str, str]:
    """Keys of config.json that upstream reads without a default, each with the class that reads it.

    >>> needed_keys("qwen3")["seq_length"]
    'QWenConfig'
    """
    classes = facts()["config"]["classes"]
    return {
        key: one["name"]
        for one in classes
        if one["families"] == "all" or family in one["families"]
        for key in one["needs"]
    }


@cache
def facts() -> Mapping[str, Any]:
    """Return the whole of data/checkpoint.yaml."""
    file = resources.files("pipeline.contracts").joinpath("data/checkpoint.yaml")
    loaded: Mapping[str, Any] = parse_yaml(file.read_text(encoding="utf-8"))
    return loaded


def _format(form: Format) -> Mapping[str, Any]:
    found: Mapping[str, Any] = facts()["formats"][str(form)]
    return found
