"""The checkpoint that trtllm-build reads: what each rank holds, what config.json says, and how to know it.

The facts are data (`data/checkpoint.yaml`, each with its source), for TensorRT-LLM 1.0 to 1.2 and Llama, Mistral,
Mixtral, Phi-3, Qwen2 and Qwen3. How tensors are divided is in `pipeline.runtimes.tensorrt.checkpoint`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contracts import read_facts
from pipeline.errors import CheckpointError
from pipeline.models import Architecture, Format, TensorFiles
from pipeline.models.header import HeaderEntry


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
        algorithm: str | None = _format(self.format)["algorithm"]
        return algorithm

    @property
    def hidden_act(self) -> str:
        """`hidden_act` of config.json."""
        model, names = self.architecture, _facts()["config"]["hidden_act"]
        kind = "experts" if model.experts else "fused" if model.fused else "other"
        return str(names[kind])

    def tensors(self, rank: int) -> dict[str, ExpectedTensor]:
        """Map the name of every tensor of a rank (0 to `world` - 1) to its type and shape."""
        return dict(self._tensors(rank // self.tensor))

    def _tensors(self, stage: int) -> Iterator[tuple[str, ExpectedTensor]]:
        tensors, sizes = _facts()["tensors"], self._symbols()
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
        own_sizes = dict(sizes) | {
            "rows": rows,
            "columns": columns,
            "packed_rows": rows // 2,
            "packed_columns": columns // 2,
            "groups": columns // (self.group_size or columns),
        }
        for part in _format(self.format)["layer"]:
            shape = part["stacked" if entry.get("stacked") else "shape"]
            yield f"{name}.{part['suffix']}", self._expected(part, shape, own_sizes)
        if "bias" in entry and getattr(self.architecture, entry["bias"]):
            yield f"{name}.bias", self._expected({}, ["rows"], own_sizes)

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
    classes = _facts()["config"]["classes"]
    return {
        key: config_class["name"]
        for config_class in classes
        if config_class["families"] == "all" or family in config_class["families"]
        for key in config_class["needs"]
    }


def _format(form: Format) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = _facts()["formats"][str(form)]
    return facts


def _facts() -> Mapping[str, Any]:
    return read_facts("checkpoint.yaml")


_AT_ONCE = 2**23  # numbers
_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
_TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list}


def faults_of(directory: Path, layout: CheckpointLayout, *, values: bool = True) -> list[str]:
    """List everything that is missing, left over, of the wrong type or shape, or not a usable number.

    Args:
        values: read all numbers, too; otherwise the headers only.
    """
    faults = [*_file_faults(directory, layout), *_config_faults(directory / "config.json", layout)]
    if not faults:
        for rank in range(layout.world):
            faults += _rank_faults(directory, f"rank{rank}.safetensors", layout.tensors(rank), values)
    return faults


def check_files(directory: Path, layout: CheckpointLayout, *, values: bool = True) -> None:
    """Raise CheckpointError with all faults of a checkpoint, if there are any. Args as `faults_of`."""
    faults = faults_of(directory, layout, values=values)
    if faults:
        raise CheckpointError(
            "\n  ".join([f"{directory} is not a TensorRT-LLM checkpoint as asked for:", *faults])
        )


def _file_faults(directory: Path, layout: CheckpointLayout) -> Iterator[str]:
    wanted = {"config.json", *(f"rank{rank}.safetensors" for rank in range(layout.world))}
    names = {path.name for path in directory.iterdir()}
    yield from (f"{name} is missing" for name in sorted(wanted - names))
    yield from (f"{name} is not expected" for name in sorted(names - wanted))


def _config_faults(path: Path, layout: CheckpointLayout) -> Iterator[str]:
    if not path.exists():
        return
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    yield from _key_faults(config, layout.architecture.family)
    for key, (got, want) in _values(config, layout).items():
        if got != want:
            yield f"config.json: {key} is {got!r}, not {want!r}"


def _key_faults(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """Names and types, by the contract."""
    contract = _facts()["config"]
    known = {entry["key"]: entry for entry in contract["keys"]}
    for key, reason in contract["never"].items():
        if key in config:
            yield f"config.json: {key} must not be there: {reason}"
    for key in sorted(config.keys() - known.keys() - contract["never"].keys()):
        yield f"config.json: {key} is not a key of TensorRT-LLM"
    for key, reader in needed_keys(family).items():
        if key not in config:
            yield f"config.json: {key} is missing, and {reader} has no default for it"
    for key in sorted(config.keys() & known.keys()):
        kind, values = known[key]["type"], known[key].get("values")
        if not _is(config[key], kind):
            yield f"config.json: {key} is {config[key]!r}, which is no {kind}"
        elif values is not None and config[key] not in values:
            yield f"config.json: {key} is {config[key]!r}, not {' or '.join(values)}"
    yield from _section_faults("mapping", config.get("mapping"), contract["mapping_keys"])
    fields = {entry["key"]: entry["type"] for entry in _facts()["quantization"]["fields"]}
    quantization = config.get("quantization") or {}
    yield from _section_faults("quantization", quantization, fields)
    for key in sorted(fields.keys() & quantization.keys()):
        if not _is(quantization[key], fields[key]):
            yield f"config.json: quantization.{key} is {quantization[key]!r}, which is no {fields[key]}"


def _section_faults(name: str, section: Mapping[str, Any] | None, known: Any) -> Iterator[str]:
    for key in sorted(set(section or {}) - set(known)):
        yield f"config.json: {name}.{key} is not a key of TensorRT-LLM"


def _is(value: Any, kinds: str) -> bool:
    for kind in kinds.split("|"):
        if kind == "null":
            if value is None:
                return True
        elif isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool)):  # type: ignore[arg-type]
            return True
    return False


def _values(config: Mapping[str, Any], layout: CheckpointLayout) -> dict[str, tuple[Any, Any]]:
    """Key -> what is there, and what must be."""
    model = layout.architecture
    quantization, mapping = config.get("quantization") or {}, config.get("mapping") or {}
    wanted: dict[str, Any] = {
        "architecture": model.class_name,
        "dtype": _DTYPES[layout.dtype],
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_size": model.hidden,
        "head_size": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": layout.vocab,
        "max_position_embeddings": model.max_positions,
        "norm_epsilon": model.norm_epsilon,
        "rotary_base": model.rope.theta,
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": layout.hidden_act,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
    }
    pairs = {key: (config.get(key), want) for key, want in wanted.items()}
    sizes = {"world_size": layout.world, "tp_size": layout.tensor, "pp_size": layout.pipeline}
    if model.experts:
        sizes |= {"moe_tp_size": layout.tensor // layout.expert, "moe_ep_size": layout.expert}
        moe = config.get("moe") or {}
        pairs["moe.num_experts"] = (moe.get("num_experts"), model.experts)
        pairs["moe.top_k"] = (moe.get("top_k"), model.experts_per_token)
    pairs |= {f"mapping.{key}": (mapping.get(key), size) for key, size in sizes.items()}
    algorithms = {
        "quant_algo": layout.algorithm,
        "kv_cache_quant_algo": "FP8" if layout.kv_cache == "fp8" else None,
        "group_size": layout.group_size,
    }
    return pairs | {f"quantization.{key}": (quantization.get(key), want) for key, want in algorithms.items()}


def _rank_faults(
    directory: Path, file: str, expected: Mapping[str, ExpectedTensor], values: bool
) -> Iterator[str]:
    tensors = TensorFiles(directory, pattern=file)
    for name in sorted(expected.keys() - tensors.keys()):
        yield f"{file}: {name} is missing"
    for name, header in tensors.headers.items():
        if name not in expected:
            yield f"{file}: {name} is not expected"
            continue
        yield from (f"{file}: {fault}" for fault in _header_faults(header, expected[name]))
        if values:
            yield from (f"{file}: {fault}" for fault in _value_faults(name, tensors[name]))


def _header_faults(header: HeaderEntry, expected: ExpectedTensor) -> Iterator[str]:
    if header.dtype not in expected.dtypes:
        yield f"{header.name} is {header.dtype}, not {' or '.join(expected.dtypes)}"
    single = expected.shape == (1,) and header.shape == ()  # both are read as one number
    if header.shape != expected.shape and not single:
        yield f"{header.name} has shape {list(header.shape)}, not {list(expected.shape)}"


def _value_faults(name: str, values: np.ndarray[Any, Any]) -> Iterator[str]:
    if values.dtype.kind in "iu":
        return
    flat, finite, positive = values.reshape(-1), True, True
    for at in range(0, flat.size, _AT_ONCE):
        numbers = flat[at : at + _AT_ONCE].astype(np.float32)
        finite &= bool(np.isfinite(numbers).all())
        positive &= bool((numbers > 0).all())
    if not finite:
        yield f"{name} holds values that are not finite"
    elif name.endswith("scaling_factor") and not positive:
        yield f"{name} holds scales that are not positive"
