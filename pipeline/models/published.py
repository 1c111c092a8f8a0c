"""Formats of a published checkpoint's weights, one by one, and of its KV cache, whoever quantized it.

It is said by `quantization_config` of config.json (also within `text_config`) and by hf_quant_config.json beside it,
which in many of NVIDIA's checkpoints is the only statement. A method that is not among those below is refused by name:
a checkpoint that is taken for another one is planned, and served, wrongly.

Methods: ModelOpt, also of mixed precision by layer; `fp8` (blocks, or one scale a tensor), with experts in MXFP4 or
NVFP4 (DeepSeek V4); compressed-tensors with groups of targets; MXFP4 (gpt-oss), AWQ and GPTQ. Files of weights are not
looked at; `pipeline.models.quantization` reads those that ModelOpt wrote here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import Fault
from pipeline.models.blocks import WeightTensor
from pipeline.models.layer_names import NamePatterns, bare_name

# Names of TensorRT-LLM's `QuantAlgo` (tensorrt_llm/quantization/mode.py @cf44a1ccee7d) and of ModelOpt 0.47
# (torch/export/quant_utils.py, which writes some in lower case) -> formats in `contracts/data/engine_memory.yaml`.
ALGORITHMS: Mapping[str, str] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_row",
    "FP8_BLOCK_SCALES": "fp8_block",
    "FP8_PB_WO": "fp8_block",
    "FP8_PB_REAL": "fp8_block",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "w4a16_nvfp4",
    "W4A8_NVFP4_FP8": "w4a8_nvfp4",
    "MXFP4": "mxfp4",
    "W4A16_MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "W4A8_MXFP4_MXFP8": "mxfp4",
    "MXFP8": "mxfp8",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "W4A16": "int4",
    "W8A16": "int8_row",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
}
_KV_ALGORITHMS = {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8"}
_PACKINGS = (
    "dense", "pack-quantized", "naive-quantized", "float-quantized", "int-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_BY_TOKEN: Mapping[Any, str] = {("int", 8, "token"): "int8", ("float", 8, "token"): "fp8"}
_WHOLE_ROW = 2**31  # a group as wide as the matrix


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Format of a weight, and how many columns share a scale (0: as the format says)."""

    name: str = "none"
    group: int = 0
    dynamic: str = ""  # inputs are rounded by scales found as they come: "int8" or "fp8" a token, or "other"


_PLAIN = StoredFormat()


@dataclass(frozen=True, slots=True)
class _Rule:
    """Format of the weights that are named, of those that are linear layers, or of routed experts."""

    format: StoredFormat
    named: NamePatterns | None = None
    experts_only: bool = False

    def holds(self, name: str, *, expert: bool) -> bool:
        return (expert or not self.experts_only) and (self.named is None or self.named.match(name))


@dataclass(frozen=True, slots=True)
class PublishedQuantization:
    """Formats of a checkpoint's weights: the first rule that holds for a weight; none for weights that are left out.

    Attributes:
        kept: Layers that no rule holds for.
        head: Whether rules without names hold for the output projection, too.
        kv_cache: Type of keys and values ("fp8"), or None where nothing is said.
        method: `quant_method`, by whose rules the tensors are named and packed.
    """

    rules: tuple[_Rule, ...] = ()
    kept: NamePatterns | None = None
    head: bool = False
    kv_cache: str | None = None
    method: str = ""

    def stored(self, weights: Iterable[WeightTensor]) -> tuple[WeightTensor, ...]:
        """Return the weights with their formats; experts that differ from each other come apart."""
        if not self.rules:
            return tuple(weights)
        by_expert = any(pattern.expert_names for pattern in self._patterns())
        return tuple(part for weight in weights for part in self._stored(weight, by_expert=by_expert))

    def unmatched(self, weights: Iterable[WeightTensor]) -> bool:
        """Whether there are rules by name, and no weight that any of them names."""
        named = [rule.named for rule in self.rules if rule.named is not None]
        return bool(named) and not any(pattern.match(weight.name) for pattern in named for weight in weights)

    def _stored(self, weight: WeightTensor, *, by_expert: bool) -> Iterator[WeightTensor]:
        if not (weight.quantizable or weight.kind == "lm_head"):
            yield weight
        elif weight.is_expert and by_expert:
            names = (
                weight.name.replace(".experts.0.", f".experts.{index}.") for index in range(weight.copies)
            )
            formats = Counter(self._format(name, expert=True) for name in names)
            for form, count in formats.items():
                yield replace(weight, stored=form.name, group=form.group, copies=count)
        else:
            form = self._format(weight.name, expert=weight.is_expert, head=weight.kind == "lm_head")
            yield weight.published_in(form.name, form.group)

    def _patterns(self) -> Iterator[NamePatterns]:
        yield from (rule.named for rule in self.rules if rule.named is not None)
        if self.kept is not None:
            yield self.kept

    @property
    def formats(self) -> tuple[StoredFormat, ...]:
        """Formats that layers may have, without those that keep their precision."""
        return tuple(rule.format for rule in self.rules if rule.format != _PLAIN)

    def of(self, layer: str) -> StoredFormat:
        """Return the format of a linear layer by its name in the files."""
        return self._format(bare_name(layer), expert=".experts." in layer, head=layer == "lm_head")

    def _format(self, name: str, *, expert: bool, head: bool = False) -> StoredFormat:
        is_kept = self.kept is not None and self.kept.match(name)
        for rule in self.rules:
            if is_kept or (rule.named is None and head and not self.head):
                continue
            if rule.holds(name, expert=expert):
                return rule.format
        return _PLAIN


def read_published(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> tuple[PublishedQuantization, tuple[Fault, ...]]:
    """Read how a checkpoint is quantized, by its config.json and, if there is one, its hf_quant_config.json.

    Returns:
        The formats, and every fault; what is returned with faults says nothing.
    """
    try:
        return _read(config, beside or {}), ()
    except _Unreadable as error:
        return PublishedQuantization(), (error.fault,)
    except re.error as error:
        return PublishedQuantization(), (
            Fault(f"has a pattern that is not a regular expression: {error}", key=_KEY),
        )


_KEY = "quantization_config"


class _Unreadable(Exception):
    def __init__(self, problem: str, key: str, value: object = None, fix: str = "") -> None:
        self.fault = Fault(problem, key=key, value=value, fix=fix)


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """Return what a config.json says of quantization, wherever it stands in it; {} if nothing."""
    levels = [level for level in (config, config.get("text_config")) if isinstance(level, Mapping)]
    entries = (level.get(key) for level in levels for key in (_KEY, "compression_config"))
    return next((settings for settings in entries if settings is not None), {})


def _read(config: Mapping[str, Any], beside: Mapping[str, Any]) -> PublishedQuantization:
    inside, outside = quantization_settings(config), beside.get("quantization") or {}
    for key, value in ((_KEY, inside), ("hf_quant_config.json quantization", outside)):
        if not isinstance(value, Mapping):
            raise _Unreadable("is not an object of settings", key, value)
    if not inside and not outside:
        return PublishedQuantization()
    own, other = inside.get("quant_algo"), outside.get("quant_algo")
    if own is not None and other is not None and own != other:
        raise _Unreadable(
            "hf_quant_config.json says otherwise",
            f"{_KEY}.quant_algo",
            own,
            f"{other}, or the other file changed",
        )
    settings = {**inside, **{key: value for key, value in outside.items() if value is not None}}
    method = inside.get("quant_method")
    if method is None:
        method = "modelopt" if settings.get("quant_algo") or outside else "compressed-tensors"
        if method == "compressed-tensors" and not settings.get("config_groups"):
            raise _Unreadable("is missing", f"{_KEY}.quant_method", fix=f"one of {', '.join(METHODS)}")
    if not isinstance(method, str) or method not in METHODS:
        raise _Unreadable("is not known", f"{_KEY}.quant_method", method, f"one of {', '.join(METHODS)}")
    quantization = METHODS[method](settings, config)
    return replace(quantization, kv_cache=_kv_cache(settings), method=method)


def _kv_cache(settings: Mapping[str, Any]) -> str | None:
    algorithm, scheme = settings.get("kv_cache_quant_algo"), settings.get("kv_cache_scheme")
    if algorithm is not None:
        if not isinstance(algorithm, str) or algorithm not in _KV_ALGORITHMS:
            fix = f"one of {', '.join(_KV_ALGORITHMS)}, or null"
            raise _Unreadable("is not known", "kv_cache_quant_algo", algorithm, fix)
        return _KV_ALGORITHMS[algorithm]
    if scheme is None:
        return None
    kinds = {(8, "float"): "fp8", (4, "float"): "nvfp4", (8, "int"): "int8"}
    kind = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, Mapping) else None
    if kind not in kinds:
        raise _Unreadable("is not known", "kv_cache_scheme", scheme, "8 bits of float or int, or 4 of float")
    return kinds[kind]


def _names(settings: Mapping[str, Any], *keys: str) -> list[str]:
    names: list[str] = []
    for key in keys:
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _Unreadable("is not a list of names of layers", f"{_KEY}.{key}", value)
        names += value
    return names


def _group(settings: Mapping[str, Any], where: str, key: str = "group_size") -> int:
    value = settings.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value == 0 or value < -1:
        raise _Unreadable("must be a positive number, or -1 for whole rows", f"{where}.{key}", value)
    return _WHOLE_ROW if value < 0 else value


def _algorithm(settings: Mapping[str, Any], where: str) -> StoredFormat:
    name = settings.get("quant_algo")
    if not isinstance(name, str) or name.upper() not in ALGORITHMS:
        raise _Unreadable("is not known", f"{where}.quant_algo", name, f"one of {', '.join(ALGORITHMS)}")
    return StoredFormat(ALGORITHMS[name.upper()], _group(settings, where))


def _modelopt(settings: Mapping[str, Any], _config: Mapping[str, Any]) -> PublishedQuantization:
    kept = NamePatterns(_names(settings, "exclude_modules", "ignore"))
    algorithm = settings.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        return PublishedQuantization(_layer_rules(settings), kept)
    if algorithm is None and "quant_algo" in settings:  # only the KV cache is
        return PublishedQuantization()
    return PublishedQuantization((_Rule(_algorithm(settings, _KEY)),), kept)


def _layer_rules(settings: Mapping[str, Any]) -> tuple[_Rule, ...]:
    """One rule for each format of `quantized_layers`."""
    layers, where = settings.get("quantized_layers"), f"{_KEY}.quantized_layers"
    if not isinstance(layers, Mapping) or not layers:
        raise _Unreadable("must give an algorithm for each layer, for MIXED_PRECISION", where, layers)
    named: dict[StoredFormat, list[str]] = {}
    for name, layer in layers.items():
        if not isinstance(layer, Mapping):
            raise _Unreadable("is not an object of settings", f"{where}.{name}", layer)
        named.setdefault(_algorithm(layer, f"{where}.{name}"), []).append(str(name))
    return tuple(_Rule(form, NamePatterns(names)) for form, names in named.items())


def _fp8(settings: Mapping[str, Any], config: Mapping[str, Any]) -> PublishedQuantization:
    """FP8 of whole tensors or of blocks; DeepSeek V4 keeps its experts in four bits."""
    blocks = settings.get("weight_block_size")
    if blocks is not None and blocks != [128, 128]:
        raise _Unreadable("is not known", f"{_KEY}.weight_block_size", blocks, "[128, 128]")
    base = _Rule(StoredFormat("fp8" if blocks is None else "fp8_block"))
    experts = config.get("expert_dtype")
    if experts not in (None, "fp4", "fp8"):
        raise _Unreadable("is not known", "expert_dtype", experts, "fp4 or fp8")
    rules = (_Rule(StoredFormat("mxfp4"), experts_only=True), base) if experts == "fp4" else (base,)
    if settings.get("quant_algo") == "MIXED_PRECISION":
        # The lists name what was quantized once more; all else is as it was.
        return PublishedQuantization((*_layer_rules(settings), *rules))
    kept = _names(settings, "modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")
    return PublishedQuantization(rules, NamePatterns(kept))


_Reader = Callable[[Mapping[str, Any], Mapping[str, Any]], PublishedQuantization]


def _single(form: str, *, experts_only: bool = False) -> _Reader:
    """Make the reader of a method with one format, of all layers or of routed experts alone."""

    def read(settings: Mapping[str, Any], _config: Mapping[str, Any]) -> PublishedQuantization:
        kept = NamePatterns(_names(settings, "modules_to_not_convert"))
        return PublishedQuantization((_Rule(StoredFormat(form), experts_only=experts_only),), kept)

    return read


def _four_bits(form: str) -> _Reader:
    def read(settings: Mapping[str, Any], _config: Mapping[str, Any]) -> PublishedQuantization:
        bits = settings.get("bits", settings.get("w_bit", 4))
        if bits != 4:
            raise _Unreadable("is not known", f"{_KEY}.bits", bits, "4")
        kept = NamePatterns(_names(settings, "modules_to_not_convert"))
        group = _group(settings, _KEY, "group_size" if "group_size" in settings else "q_group_size") or 128
        head = settings.get("lm_head") is True
        return PublishedQuantization((_Rule(StoredFormat(form, group)),), kept, head=head)

    return read


def _compressed(settings: Mapping[str, Any], _config: Mapping[str, Any]) -> PublishedQuantization:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _Unreadable("must say what is quantized, and how", f"{_KEY}.config_groups", groups)
    named, everything = list[_Rule](), list[_Rule]()
    for name, group in groups.items():
        where = f"{_KEY}.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping | None):
            raise _Unreadable("is not an object of settings", where, group)
        packing = group.get("format") or settings.get("format") or "dense"
        if packing not in _PACKINGS:
            raise _Unreadable("is not known", f"{where}.format", packing, f"one of {', '.join(_PACKINGS)}")
        targets = _names(group, "targets")
        form = _PLAIN if group.get("weights") is None else _scheme(group["weights"], f"{where}.weights")
        inputs = group.get("input_activations")
        if form.name == "nvfp4" and inputs is None:
            form = StoredFormat("w4a16_nvfp4", form.group)
        if isinstance(inputs, Mapping) and inputs.get("dynamic") is True:
            kind = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"))
            form = replace(form, dynamic=_BY_TOKEN.get(kind, "other"))
        classes = [target for target in targets if target[:1].isupper()]
        if unknown := sorted(set(classes) - {"Linear"}):
            raise _Unreadable("names classes that are not known", f"{where}.targets", unknown, "Linear")
        layers = [target for target in targets if target not in classes]
        if layers:
            named.append(_Rule(form, NamePatterns(layers)))
        if classes:
            everything.append(_Rule(form))
    return PublishedQuantization((*named, *everything), NamePatterns(_names(settings, "ignore")), head=True)


def _scheme(weights: Mapping[str, Any], where: str) -> StoredFormat:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    group = _group(weights, where)
    match (kind, bits):
        case ("float", 4) if group in (16, 32):
            return StoredFormat("nvfp4" if group == 16 else "mxfp4", group)
        case ("float", 8) if strategy == "block" and weights.get("block_structure") in (
            [128, 128],
            "128x128",
            None,
        ):
            return StoredFormat("fp8_block")
        case ("float", 8) if strategy in ("tensor", None) and not group:
            return StoredFormat("fp8")
        case ("float", 8) if strategy == "channel":
            return StoredFormat("fp8_row")
        case ("float", 8) if group == 32:
            return StoredFormat("mxfp8", group)
        case ("int", 4):
            form = "int4" if weights.get("symmetric", True) else "int4_zeros"
            return StoredFormat(form, group or _WHOLE_ROW)
        case ("int", 8):
            return StoredFormat("int8_group", group) if 0 < group < _WHOLE_ROW else StoredFormat("int8_row")
    scheme = {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": weights.get("group_size")}
    raise _Unreadable(
        "is not known", where, scheme, "4 or 8 bits of int, 8 bits of float, or 4 in groups of 16 or 32"
    )


METHODS: Mapping[str, _Reader] = {
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "fp8": _fp8,
    "fbgemm_fp8": _single("fp8_row"),
    "compressed-tensors": _compressed,
    "mxfp4": _single("mxfp4", experts_only=True),
    "awq": _four_bits("int4_awq"),
    "gptq": _four_bits("int4_zeros"),
}
