"""Arguments of TensorRT-LLM's LLM API on its PyTorch backend: which there are, and what upstream would refuse.

The facts are data (`data/llm_args.yaml`, each with its source); this answers from them. `check` judges like upstream's
pydantic models: types, choices, bounds, nested settings, keys that do not exist, then the rules across fields. Nothing
of TensorRT-LLM is imported. A version is added by adding data.

>>> [str(fault) for fault in check("1.2.1", {"model": "m", "max_batchsize": 8})]
['max_batchsize = 8: is not an argument in TensorRT-LLM 1.2.1 (did you mean max_batch_size?)']
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from pydantic import ValidationError

from pipeline.contracts.llm_models import Models
from pipeline.contracts.llm_rules import RULES
from pipeline.contracts.version_range import holding, refuse_unknown, release_of
from pipeline.errors import Fault, UserError
from pipeline.resources import parse_yaml

ARGUMENTS = "LlmArgs"
SPECULATION = "speculative_config"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a way to propose tokens is written in `speculative_config`, and what it costs."""

    decoding_type: str
    draft_key: str | None  # the key that names the checkpoint of a draft; None where there is no draft
    two_models: bool  # two models that run in turns, which upstream cannot overlap with scheduling
    extra: Mapping[str, Any] = field(default_factory=dict)  # settings that the version needs besides


def versions() -> tuple[str, ...]:
    """Versions of TensorRT-LLM whose arguments are known, oldest first."""
    return tuple(_data()["versions"])


def require(version: str) -> None:
    """Raises UserError if the arguments of a version are not known; the text says why, or what is near."""
    for refused in _data()["refused"]:
        if release_of(version) in refused["versions"]:
            raise UserError(
                f"TensorRT-LLM {version} with runtime.kind pytorch: {refused['reason']} "
                f"(oldest that is taken: {versions()[0]})"
            )
    refuse_unknown(version, versions())


def names(version: str) -> tuple[str, ...]:
    """Names of all arguments in a version."""
    require(version)
    return _models(version).names(ARGUMENTS)


def speculation(version: str, method: str) -> Speculation:
    """How a method of the recipe (ngram, mtp, draft_target, eagle3) is written in a version."""
    require(version)
    entry = next(
        entry for entry in holding(_data()["speculation"], version, versions()) if entry["method"] == method
    )
    return Speculation(
        decoding_type=entry["decoding_type"],
        draft_key=entry.get("draft_key"),
        two_models=entry["two_models"],
        extra=dict(entry.get("extra", {})),
    )


def check(version: str, arguments: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Everything that upstream would refuse in the arguments; nothing, if it would start.

    Raises:
        UserError: the version is not known.
    """
    require(version)
    models = _models(version)
    faults: list[Fault] = []
    values = _read(models, version, ARGUMENTS, arguments, faults)
    if arguments.get(SPECULATION) is not None:
        values[SPECULATION] = _read_speculation(models, version, arguments[SPECULATION], faults)
    if not faults:
        rules = holding(_data()["rules"], version, versions())
        faults += [fault for rule in rules for fault in RULES[rule["id"]](values)]
    return tuple(faults)


def _read_speculation(models: Models, version: str, given: Any, faults: list[Fault]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        faults.append(Fault("must be settings, with decoding_type among them", key=SPECULATION, value=given))
        return {}
    known = {entry["name"]: entry for entry in holding(_data()["decoding_types"], version, versions())}
    chosen = given.get("decoding_type")
    key = f"{SPECULATION}.decoding_type"
    if chosen not in known:
        text = "is missing" if chosen is None else f"is not known to TensorRT-LLM {version}"
        faults.append(Fault(text, key=key, value=chosen, fix=_one_of(str(chosen), tuple(known))))
        return {}
    if "refused" in known[chosen]:
        reason = known[chosen]["refused"]
        faults.append(Fault(f"does not run on the PyTorch backend: {reason}", key=key, value=chosen))
        return {}
    rest = {name: value for name, value in given.items() if name != "decoding_type"}
    values = _read(models, version, known[chosen]["model"], rest, faults, f"{SPECULATION}.")
    return {"decoding_type": chosen, **values}


def _read(
    models: Models,
    version: str,
    name: str,
    given: Mapping[str, Any],
    faults: list[Fault],
    prefix: str = "",
) -> dict[str, Any]:
    """The values as upstream reads them, without those that were not given; adds to the faults."""
    try:
        return models[name].model_validate(dict(given)).model_dump(exclude_unset=True)
    except ValidationError as error:
        for found in error.errors(include_url=False, include_context=False):
            key = prefix + ".".join(map(str, found["loc"]))
            if found["type"] == "extra_forbidden":
                inside = _model_at(models, name, found["loc"][:-1])
                text = f"is not an argument in TensorRT-LLM {version}"
                fix = _instead(str(found["loc"][-1]), models.names(inside) if inside else ())
                faults.append(Fault(text, key=key, value=found["input"], fix=fix))
            elif found["type"] == "missing":
                faults.append(Fault("is missing", key=key))
            else:
                text = found["msg"].removeprefix("Value error, ")
                faults.append(Fault(text[0].lower() + text[1:], key=key, value=found["input"]))
    return {}


def _model_at(models: Models, name: str, location: Sequence[int | str]) -> str | None:
    """The model of this contract at a location inside another."""
    found: str | None = name
    for part in location:
        found = models.nested(found, str(part)) if found else None
    return found


def _instead(name: str, known: Sequence[str]) -> str:
    for entry in _data()["renamed"]:
        if entry["from"] == name:
            return f"write {entry['to']}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _one_of(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=2, cutoff=0.6) or known
    return f"one of {', '.join(near)}"


@cache
def _models(version: str) -> Models:
    return Models(
        {name: tuple(holding(fields, version, versions())) for name, fields in _data()["models"].items()}
    )


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.contracts") / "data" / "llm_args.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
