"""A LoRA adapter as peft saves it: adapter_config.json and adapter_model.safetensors, read by their headers.

    y = W x + scale * B (A x)            A [rank, inputs], B [outputs, rank]

Written against peft 0.21 (`LoraConfig`; names of tensors by `get_peft_model_state_dict`). What an adapter brings beyond
pairs of A and B for linear layers is a fault, because a server would leave it out. Nothing here needs numpy.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, InvalidInput
from pipeline.models.folder import ADAPTER_CONFIG, CheckpointFolder
from pipeline.models.header import read_entries
from pipeline.models.sizes import ModelSizes
from pipeline.reading import UnreadableFile, parse_json

WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
_MOST_NAMED = 8
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>\S{1,500})\.lora_(?P<part>[AB])\.weight", re.ASCII)
_LAYER = re.compile(r"(?:\w+\.){0,4}?(?P<name>layers\.\d{1,5}\.\S+)", re.ASCII)
_PLAIN = re.compile(r"[\w.]+", re.ASCII)
# Setting of peft that changes what an adapter computes -> why an adapter with it is refused.
_UNSUPPORTED = {
    "use_dora": "DoRA rescales the base's weights, which TensorRT-LLM leaves out without a word",
    "modules_to_save": "whole layers of its own take the place of the base's for all requests, or are left out",
    "bias": "biases of its own are not loaded",
    "lora_bias": "biases of its own are not loaded",
    "fan_in_fan_out": "the base's linear layers are stored the other way round",
    "target_parameters": "adapters of stacked experts are not loaded",
    "trainable_token_indices": "rows of the embedding of its own are not loaded",
    "layer_replication": "it has other layers than the base",
    "alora_invocation_tokens": "it holds from a token of the prompt on, which no server here tells apart",
    "arrow_config": "it is a router of adapters",
    "use_qalora": "its inputs are pooled in groups",
    "use_bdlora": "its matrices are block-diagonal",
    "megatron_config": "it is one of Megatron's layers",
    "kasa_config": "the base's weights are changed before",
}
# Values of init_lora_weights that leave the base's weights as they are.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The pair of matrices of one linear layer."""

    name: str  # as in `ModelSizes`: "layers.0.self_attn.q_proj"
    tensor: str  # begins the names of both tensors in the file
    rank: int
    inputs: int
    outputs: int
    scale: float

    @property
    def layer(self) -> int:
        """Number of the decoder's layer, from 0."""
        return int(self.name.split(".", 2)[1])


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by its files' headers.

    Attributes:
        base: Name of its base, as training wrote it; empty if it names none.
        modules: Pairs that are whole.
        has_alphas: Whether modules have an alpha of their own (`alpha_pattern`).
        faults: Why it cannot be served, whatever its base.
        file_bytes: Size of its weights on disk; 0: not known.
    """

    base: str = ""
    modules: tuple[AdapterModule, ...] = ()
    has_alphas: bool = False
    faults: tuple[str, ...] = ()
    file_bytes: int = 0

    @property
    def rank(self) -> int:
        """Largest rank."""
        return max((module.rank for module in self.modules), default=0)

    @property
    def parameters(self) -> int:
        """Numbers in all matrices."""
        return sum(module.rank * (module.inputs + module.outputs) for module in self.modules)

    def base_faults(self, sizes: ModelSizes) -> Iterator[str]:
        """Yield why it does not fit a model: layers that the model lacks, experts, and other shapes."""
        layers = {weight.name: weight for weight in sizes.weights() if weight.columns > 1}
        experts = [module.name for module in self.modules if ".experts." in f"{module.name}."]
        if experts:
            yield f"adapts experts ({_named(experts)}), which servers ignore without a word, or with a warning"
        if (last := max((module.layer for module in self.modules), default=0)) >= sizes.layers:
            yield f"adapts layer {last}; the base has layers 0 to {sizes.layers - 1}"
        known_layers = [
            module for module in self.modules if module.name not in experts and module.layer < sizes.layers
        ]
        if lacking := [module.name for module in known_layers if module.name not in layers]:
            yield f"adapts {_named(lacking)}, which the base does not have"
        known = [(module, layers[module.name]) for module in known_layers if module.name in layers]
        if fixed := [module.name for module, weight in known if not weight.quantizable]:
            yield f"adapts {_named(fixed)}, to which servers apply no adapters"
        unfit: dict[str, list[str]] = {}
        for module, weight in known:
            base_shape, adapter_shape = (module.outputs, module.inputs), (weight.rows, weight.columns)
            if base_shape != adapter_shape:
                problem = (
                    f"is for layers of {list(base_shape)}, but those of the base are {list(adapter_shape)}"
                )
                unfit.setdefault(problem, []).append(module.name)
        yield from (f"{problem}: {_named(names)}" for problem, names in unfit.items())


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's folder; what is wrong with it is among its faults."""
    try:
        files = CheckpointFolder(folder)
        config = parse_json(files.read(ADAPTER_CONFIG), ADAPTER_CONFIG)
        with files.open(WEIGHTS) as stream:
            entries = read_entries(WEIGHTS, lambda _, size: (stream.seek(0), stream.read(size))[1])
            file_bytes = stream.seek(0, os.SEEK_END)
    except InvalidInput as error:
        return Adapter(faults=tuple(map(str, error.faults)))
    except UnreadableFile as error:
        return Adapter(faults=(f"{Path(error.fault.where or '').name}: {error.fault.problem}".lstrip(": "),))
    except CheckpointError as error:
        return Adapter(faults=(str(error),))
    shapes = {entry.name: entry.shape for entry in entries}
    floats = {entry.name for entry in entries if entry.dtype in ("F64", "F32", "F16", "BF16")}
    adapter = adapter_of(config, shapes, wrong_types=sorted(shapes.keys() - floats))
    return replace(adapter, file_bytes=file_bytes)


def adapter_of(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], wrong_types: Sequence[str] = ()
) -> Adapter:
    """Judge an adapter by its settings and the shapes of its tensors.

    >>> shapes = {f"base_model.model.model.layers.0.mlp.up_proj.lora_{letter}.weight": shape
    ...           for letter, shape in (("A", (8, 64)), ("B", (128, 8)))}
    >>> adapter_of({"peft_type": "LORA", "r": 8, "lora_alpha": 16}, shapes).modules[0].scale
    2.0
    """
    faults = list(_config_faults(config))
    if wrong_types:
        faults.append(f"holds {_named(wrong_types)} in another type than F32, F16 or BF16")
    pairs: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    strange: list[str] = []
    for name, shape in shapes.items():
        if (match := _TENSOR.fullmatch(name)) is None or len(shape) != 2 or 0 in shape:
            strange.append(name)
            continue
        pairs.setdefault(match["module"], {})[match["part"]] = (name, shape)
    modules = []
    for module, parts in pairs.items():
        layer = _LAYER.fullmatch(module)
        if layer is None or parts.keys() != {"A", "B"} or parts["A"][1][0] != parts["B"][1][1]:
            strange.append(module)
        else:
            (tensor, (rank, inputs)), (_, (outputs, _)) = parts["A"], parts["B"]
            scale = _scale(config, module, rank)
            prefix = tensor.removesuffix(".lora_A.weight")
            modules.append(AdapterModule(layer["name"], prefix, rank, inputs, outputs, scale))
    if strange:
        faults.append(
            f"holds {_named(strange)}, which is no pair of matrices of a linear layer within the layers: servers "
            "ignore it without a word"
        )
    if not modules and not faults:
        faults.append("holds no matrices")
    if (rank := max((pair.rank for pair in modules), default=0)) > MAX_RANK:
        faults.append(f"has rank {rank}; at most {MAX_RANK} is served")
    if not all(math.isfinite(pair.scale) for pair in modules):
        faults.append("scales by a number that is not finite")
    base = config.get("base_model_name_or_path")
    return Adapter(
        base=base if isinstance(base, str) else "",
        modules=tuple(sorted(modules, key=lambda module: _order(module.name))),
        has_alphas=bool(config.get("alpha_pattern")),
        faults=tuple(faults),
    )


def _config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"{ADAPTER_CONFIG}: peft_type = {json.dumps(kind)[:80]}: must be LORA"
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        yield f"{ADAPTER_CONFIG}: lora_alpha = {json.dumps(alpha)[:80]}: must be a number"
    for key, why in _UNSUPPORTED.items():
        value = config.get(key)
        if value and value != "none":
            yield f"{ADAPTER_CONFIG}: {key} = {json.dumps(value)[:80]}: {why}"
    if (start := config.get("init_lora_weights")) not in _STARTS:
        yield (
            f"{ADAPTER_CONFIG}: init_lora_weights = {json.dumps(start)[:80]}: the base's weights are changed before, "
            "unless it is saved as an ordinary adapter (path_initial_model_for_weight_conversion)"
        )
    patterns = config.get("alpha_pattern") or {}
    plain = isinstance(patterns, Mapping) and all(
        isinstance(key, str) and _PLAIN.fullmatch(key) and isinstance(value, int | float)
        for key, value in patterns.items()
    )
    if not plain:
        yield f"{ADAPTER_CONFIG}: alpha_pattern: must be numbers by names of layers, without patterns in the names"


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """peft's `scaling`; 0 where alpha is not a number, which is reported as a fault elsewhere."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern")
    if isinstance(patterns, Mapping):
        named = (value for key, value in patterns.items() if module == key or module.endswith(f".{key}"))
        alpha = next(named, alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return 0.0
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _order(name: str) -> list[tuple[int, str]]:
    """Sort key: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _named(names: Sequence[str]) -> str:
    """The first of many names, layers of one kind once.

    >>> _named(["layers.0.mlp.gate", "layers.1.mlp.gate"])
    'layers.*.mlp.gate'
    """
    kinds = list(
        dict.fromkeys(re.sub(r"\.\d+", ".*", name[:120]) if len(names) > 1 else name[:120] for name in names)
    )
    more = f" and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
    return ", ".join(kinds[:_MOST_NAMED]) + more
