"""Arguments of TensorRT-LLM's LLM API on its PyTorch backend: which a release has, and of which types.

The facts are data (`data/llm_args.yaml`, each with its source). `check` accepts or refuses an argument by its name and
type; what upstream's validators demand beyond that is left to upstream. A version that is newer than all that was read
may have arguments that nobody here has seen: they are not refused, `unverified` lists them. A version is added by
adding data.

>>> [str(fault) for fault in check("1.2.1", {"model": "m", "max_batchsize": 8})]
['max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.contracts import read_facts, record
from pipeline.contracts.version_range import entries_in, holds, listed, require_known
from pipeline.errors import Fault

ARGUMENTS = "LlmArgs"
SPECULATION = "speculative_config"
_BASE = "DecodingBaseConfig"  # its fields are in all models whose names end in _DECODING
_DECODING = "DecodingConfig"
_AUTO_SINCE = "1.3.0rc29"  # release whose moe_config.backend may be AUTO, and is by default


@dataclass(frozen=True, slots=True)
class SpeculationFormat:
    """How a way to propose tokens is written in `speculative_config`, and what it costs."""

    decoding_type: str
    two_models: bool  # two models that run in turns, which upstream cannot overlap with scheduling
    length_key: str = "max_draft_len"  # the key of the tokens that are proposed in one round
    draft_key: str | None = None  # the key that names the checkpoint of a draft; None where there is no draft
    extra: Mapping[str, Any] = field(default_factory=dict)  # settings that the version needs besides


def expert_kernels(version: str, asked: str | None, architecture: str, sm: int) -> str:
    """Name the kernels of routed experts: those that `moe_config.backend` asks for, or those that upstream takes.

    Releases before AUTO take CUTLASS's; with it, `ModelConfig.resolve_moe_backend` decides (NVIDIA/TensorRT-LLM
    tensorrt_llm/_torch/model_config.py, file index id 4218302881).

    >>> [expert_kernels(version, None, "GptOssForCausalLM", 100) for version in ("1.2.1", "1.3.0rc29")]
    ['CUTLASS', 'TRTLLM']
    """
    if asked is not None and asked.upper() != "AUTO":
        return asked.upper()
    if architecture == "GptOssForCausalLM" and holds(version, _AUTO_SINCE, None):
        return "TRTLLM" if 100 <= sm < 120 else "TRITON" if 90 <= sm < 100 else "CUTLASS"
    return "CUTLASS"


def versions() -> tuple[str, ...]:
    """Versions of TensorRT-LLM whose arguments are known, oldest first."""
    return tuple(entry["version"] for entry in _data()["versions"])


def rests_on(version: str) -> str | None:
    """Say what the arguments of a version were read from, or None if that is its own file."""
    text: str | None = _entry(version).get("rests_on")
    return text


def require(version: str) -> None:
    """Raise UserError if the arguments of a version are not known; the text names its neighbours."""
    require_known(version, versions())


def speculation(version: str, method: str) -> SpeculationFormat:
    """Look up how a recipe's method (ngram, mtp, draft_target, eagle3) is written in a version."""
    entry = next(entry for entry in _entries("speculation", version) if entry["method"] == method)
    return record(SpeculationFormat, entry)


def decoding_types(version: str) -> tuple[str, ...]:
    """List the values of `speculative_config.decoding_type` in a version."""
    return tuple(entry["name"] for entry in _entries("decoding_types", version))


def decided() -> Mapping[str, str]:
    """Map the arguments that `runtime.llm_args` may not have, by their dotted paths, to the reason."""
    return {entry["name"]: entry["reason"] for entry in _data()["decided"]}


def unplanned(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """List the arguments, by their dotted paths, whose memory and time `pipeline plan` does not count.

    >>> unplanned({"stream_interval": 20, "moe_config": {"backend": "TRTLLM"}})
    ('moe_config.backend',)
    """
    known = {*_data()["planned"]["counted"], *_data()["planned"]["without"]}
    return tuple(path for path in _paths(arguments, "") if not {path, path.split(".")[0]} & known)


def _paths(arguments: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in arguments.items():
        inside = isinstance(value, Mapping) and value and not prefix
        yield from _paths(value, f"{name}.") if inside else (prefix + name,)


def check(version: str, arguments: Mapping[str, Any]) -> tuple[Fault, ...]:
    """List the arguments that a version does not have, or not with such a value."""
    return tuple(fault for fault, sure in _judge(version, arguments) if sure)


def has_argument(version: str, name: str) -> bool:
    """Tell whether a version has an argument, such as "kv_cache_config.dtype"; of speculation, in any way to do it."""
    fields = [_fields(version, ARGUMENTS)]
    for part in name.split("."):
        kinds = {kind.removesuffix(" | null") for types in fields if (kind := types.get(part)) is not None}
        if not kinds:
            return False
        if "speculation" in kinds:
            decoding = {entry["model"] for entry in _entries("decoding_types", version)}
            fields = [{"decoding_type": "str"}, *(_fields(version, model) for model in decoding)]
        else:
            fields = [_fields(version, model) for model in kinds if model in _data()["models"]]
    return True


def unverified(version: str, arguments: Mapping[str, Any]) -> tuple[Fault, ...]:
    """List the arguments that a version may have, because it is newer than all that was read."""
    return tuple(fault for fault, sure in _judge(version, arguments) if not sure)


# A fault, and whether it is sure that the version does not take the argument.
_Judgement = tuple[Fault, bool]


def _judge(version: str, arguments: Mapping[str, Any]) -> Iterator[_Judgement]:
    require(version)
    return _objections(version, ARGUMENTS, arguments, "")


def _objections(version: str, model: str, arguments: Mapping[str, Any], prefix: str) -> Iterator[_Judgement]:
    fields = _fields(version, model)
    for name, value in arguments.items():
        key, kinds = prefix + name, fields.get(name)
        if kinds is None:
            fault = Fault("is not an argument in", key=key, value=value)
            yield _not_known(version, fault, name, list(fields), _having(model, name, value))
        elif isinstance(value, Mapping) and (inside := kinds.removesuffix(" | null")) == "speculation":
            yield from _objections_to_speculation(version, value)
        elif isinstance(value, Mapping) and inside in _data()["models"]:
            yield from _objections(version, inside, value, f"{key}.")
        elif not _fits(value, kinds):
            fix = _those(_having(model, name, value))
            yield Fault(f"must be {kinds}", key=key, value=value, fix=fix), True


def _having(model: str, name: str, value: Any) -> list[str]:
    """Versions that take a value as a field of a model."""
    kinds = {version: _fields(version, model).get(name, "") for version in versions()}
    nested = isinstance(value, Mapping)  # its own keys are judged where it is asked for
    return [
        release for release, kind in kinds.items() if _fits(value, kind) or (nested and kind[:1].isupper())
    ]


def _objections_to_speculation(version: str, arguments: Mapping[str, Any]) -> Iterator[_Judgement]:
    models = {entry["name"]: entry["model"] for entry in _entries("decoding_types", version)}
    key, chosen = f"{SPECULATION}.decoding_type", arguments.get("decoding_type")
    fix = f"one of {', '.join(models)}"
    if chosen is None:
        yield Fault("is missing", key=key, fix=fix), True
    elif chosen in models:
        settings = {name: value for name, value in arguments.items() if name != "decoding_type"}
        yield from _objections(version, models[chosen], settings, f"{SPECULATION}.")
    else:
        having = [release for release in versions() if chosen in decoding_types(release)]
        fault = Fault("is not known to", key=key, value=chosen, fix=fix)
        yield _not_known(version, fault, str(chosen), list(models), having)


def _not_known(
    version: str, fault: Fault, name: str, known: Sequence[str], having: Sequence[str]
) -> _Judgement:
    """Judge a name that a version lacks, given the names that it has, and the versions that have this one.

    A version newer than all that was read may have a name that none of them has, unless it is a misspelling.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not (having or near) and _entry(version).get("newer"):
        text = f"is not certain to be taken by TensorRT-LLM {version}, whose own file was not at hand"
        return replace(fault, problem=text), False
    fix = f"did you mean {near[0]}?" if near and not (having or fault.fix) else fault.fix
    fix = "; ".join(filter(None, (_those(having), fix)))
    return replace(fault, problem=f"{fault.problem} TensorRT-LLM {version}", fix=fix), True


def _those(having: Sequence[str]) -> str:
    return f"TensorRT-LLM {listed(having)} take{'' if having[1:] else 's'} it" if having else ""


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
    entries = [*(models[_BASE] if model.endswith(_DECODING) else ()), *models[model]]
    return {entry["name"]: entry["type"] for entry in entries_in(entries, version, versions())}


def _entries(section: str, version: str) -> Iterator[Mapping[str, Any]]:
    return entries_in(_data()[section], version, versions())


def _entry(version: str) -> Mapping[str, Any]:
    require(version)
    return next(entry for entry in _data()["versions"] if entry["version"] == version)


def _data() -> Mapping[str, Any]:
    return read_facts("llm_args.yaml")
