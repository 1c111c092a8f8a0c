"""Arguments of TensorRT-LLM's LLM API on its PyTorch backend: which a release has, and of which types.

The facts are data (`data/llm_args.yaml`, each with its source). `check` accepts or refuses an argument by its name and
type; what upstream's validators demand beyond that is left to upstream. A version is added by adding data.

>>> [str(fault) for fault in check("1.2.1", {"model": "m", "max_batchsize": 8})]
['max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.contracts import read_facts
from pipeline.contracts.version_range import entries_in, require_known
from pipeline.errors import Fault

ARGUMENTS = "LlmArgs"
SPECULATION = "speculative_config"
_BASE = "DecodingBaseConfig"  # its fields are in all models whose names end in _DECODING
_DECODING = "DecodingConfig"


@dataclass(frozen=True, slots=True)
class SpeculationFormat:
    """How a way to propose tokens is written in `speculative_config`, and what it costs."""

    decoding_type: str
    draft_key: str | None  # the key that names the checkpoint of a draft; None where there is no draft
    two_models: bool  # two models that run in turns, which upstream cannot overlap with scheduling
    extra: Mapping[str, Any] = field(default_factory=dict)  # settings that the version needs besides


def versions() -> tuple[str, ...]:
    """Versions of TensorRT-LLM whose arguments are known, oldest first."""
    return tuple(_data()["versions"])


def require(version: str) -> None:
    """Raise UserError if the arguments of a version are not known; the text names its neighbours."""
    require_known(version, versions())


def speculation(version: str, method: str) -> SpeculationFormat:
    """Look up how a recipe's method (ngram, mtp, draft_target, eagle3) is written in a version."""
    entry = next(entry for entry in _entries("speculation", version) if entry["method"] == method)
    return SpeculationFormat(
        decoding_type=entry["decoding_type"],
        draft_key=entry.get("draft_key"),
        two_models=entry["two_models"],
        extra=dict(entry.get("extra", {})),
    )


def check(version: str, arguments: Mapping[str, Any]) -> tuple[Fault, ...]:
    """List the arguments that a version does not have, or not with such a value.

    Raises:
        UserError: the version is not known.
    """
    return tuple(_faults(version, _fields(version, ARGUMENTS), arguments, ""))


def has_argument(version: str, name: str) -> bool:
    """Tell whether a version has an argument, such as "kv_cache_config.dtype"; of speculation, in any way to do it.

    Raises:
        UserError: the version is not known.
    """
    first, *inner = name.split(".")
    fields = [_fields(version, ARGUMENTS)]
    for part in (first, *inner):
        kinds = {kind for one in fields if (kind := one.get(part)) is not None}
        if not kinds:
            return False
        models = {kind.removesuffix(" | null") for kind in kinds}
        if "speculation" in models:
            decoding = {entry["model"] for entry in _entries("decoding_types", version)}
            fields = [{"decoding_type": "str"}, *(_fields(version, model) for model in decoding)]
        else:
            fields = [_fields(version, model) for model in models if model in _data()["models"]]
    return True


def _faults(
    version: str, fields: Mapping[str, str], given: Mapping[str, Any], prefix: str
) -> Iterator[Fault]:
    for name, value in given.items():
        key, kind = prefix + name, fields.get(name, "").removesuffix(" | null")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
            text = f"is not an argument in TensorRT-LLM {version}"
            yield Fault(text, key=key, value=value, fix=f"did you mean {near[0]}?" if near else "")
        elif isinstance(value, Mapping) and kind == "speculation":
            yield from _speculation_faults(version, value)
        elif isinstance(value, Mapping) and kind in _data()["models"]:
            yield from _faults(version, _fields(version, kind), value, f"{key}.")
        elif not _fits(value, fields[name]):
            yield Fault(f"must be {fields[name]}", key=key, value=value)


def _speculation_faults(version: str, given: Mapping[str, Any]) -> Iterator[Fault]:
    models = {entry["name"]: entry["model"] for entry in _entries("decoding_types", version)}
    chosen = given.get("decoding_type")
    if chosen not in models:
        text = "is missing" if chosen is None else f"is not known to TensorRT-LLM {version}"
        fix = f"one of {', '.join(models)}"
        yield Fault(text, key=f"{SPECULATION}.decoding_type", value=chosen, fix=fix)
        return
    fields = {"decoding_type": "str", **_fields(version, models[chosen])}
    yield from _faults(version, fields, given, f"{SPECULATION}.")


def _fits(value: Any, kinds: str) -> bool:
    """Whether a value has one of the types that data/llm_args.yaml writes as "int | null"."""
    return any(_is(value, kind) for kind in kinds.split(" | "))


def _is(value: Any, kind: str) -> bool:
    name, _, inside = kind.removesuffix("]").partition("[")
    match name:
        case "null":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "dict":
            return isinstance(value, Mapping)
        case "choice":
            return value in inside.split(", ")
        case "list":
            return isinstance(value, list) and all(_is(item, inside) for item in value)
    return name == "any"


def _fields(version: str, model: str) -> dict[str, str]:
    """Name -> type of all fields of a model of the data."""
    models = _data()["models"]
    base = models[_BASE] if model.endswith(_DECODING) else ()
    found = entries_in([*base, *models[model]], version, versions())
    return {entry["name"]: entry["type"] for entry in found}


def _entries(section: str, version: str) -> Iterator[Mapping[str, Any]]:
    return entries_in(_data()[section], version, versions())


def _data() -> Mapping[str, Any]:
    return read_facts("llm_args.yaml")
