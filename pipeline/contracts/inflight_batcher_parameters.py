"""Parameters in the config.pbtxt files of TensorRT-LLM's Triton models: what each takes, by version.

The facts are in `data/inflight_batcher/*.yaml`; what the kinds mean is in its index. The C++ backend takes its default,
with no more than a warning, where it cannot read a value, so `check` is what stands between a typo and a server that
does something else.

>>> check("1.2.1", "postprocessing", {"tokenizer_dir": "1/tokenizer", "skip_special_tokens": "maybe"})
['postprocessing: skip_special_tokens = maybe: must be true or false']
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.contracts.inflight_batcher import entries_in, model_facts

Kind = Literal["text", "path", "int", "share", "fraction", "bool", "flag", "choice", "ints", "groups"]

_INTS = r"\d+(,\d+)*"
_WORDS = {"true", "1", "t", "y", "yes", "false", "0", "f", "n", "no"}


@dataclass(frozen=True, slots=True)
class BackendParameter:
    """One parameter of one model in one version."""

    name: str
    kind: Kind
    needed: Literal["value", "key"] | None = None  # `key`: must be there, but may be empty
    default: str | None = None  # what holds when it is left out, where that is a value
    values: tuple[str, ...] = ()  # of a choice
    least: int | None = None  # of a whole number
    template: str | None = (
        None  # upstream's placeholder for it; None: upstream's config.pbtxt lacks the parameter
    )
    needed_with: Mapping[str, str] = field(default_factory=dict)  # values of others that make it needed
    note: str = ""


def parameters(model: str, version: str) -> dict[str, BackendParameter]:
    """List the parameters that a model reads in a version, in upstream's order.

    Raises:
        UserError: the model or the version is not known.
    """
    entries = entries_in(model_facts(model)["parameters"], version)
    return {entry["name"]: _parameter(entry) for entry in entries}


def check(version: str, model: str, given: Mapping[str, str], ours: Collection[str] = ()) -> list[str]:
    """List every fault of a model's parameters, one line each; empty if the model would load with just these values.

    `ours`: parameters that our own source of the model reads besides upstream's.
    """
    return [f"{model}: {fault}" for fault in _faults(parameters(model, version), given, ours)]


def _faults(
    known: Mapping[str, BackendParameter], given: Mapping[str, str], ours: Collection[str]
) -> Iterator[str]:
    for name in given:
        if name not in known and name not in ours:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name}: is not read by this version" + (f"; did you mean {near[0]}?" if near else "")
    for name, parameter in known.items():
        value = given.get(name)
        if value is None:
            if parameter.needed:
                yield f"{name}: is missing, and the model does not load without it"
            elif _is_needed_with(parameter, given):
                others = ", ".join(f"{other} = {is_}" for other, is_ in parameter.needed_with.items())
                yield f"{name}: is missing, and {others} needs it"
        elif not value:
            if parameter.needed != "key":
                yield f"{name}: is empty; give it a value" + ("" if parameter.needed else ", or leave it out")
        elif "${" in value:
            yield f"{name} = {value}: a placeholder is left"
        elif not _READERS[parameter.kind](parameter, value):
            yield f"{name} = {value}: must be {_expected(parameter)}"


def _is_needed_with(parameter: BackendParameter, given: Mapping[str, str]) -> bool:
    return bool(parameter.needed_with) and all(
        given.get(other) == value for other, value in parameter.needed_with.items()
    )


def _parameter(entry: Mapping[str, Any]) -> BackendParameter:
    return BackendParameter(
        name=entry["name"],
        kind=entry["kind"],
        needed=entry.get("needed"),
        default=entry.get("default"),
        values=tuple(entry.get("values", ())),
        least=entry.get("least"),
        template=entry.get("template", entry["name"]),
        needed_with=entry.get("with", {}),
        note=entry.get("note", ""),
    )


def _is_int(parameter: BackendParameter, value: str) -> bool:
    return re.fullmatch(r"-?\d+", value, re.ASCII) is not None and (
        parameter.least is None or int(value) >= parameter.least
    )


def _is_share(_: BackendParameter, value: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII) is not None and 0 < float(value) <= 1


_READERS: Mapping[Kind, Callable[[BackendParameter, str], bool]] = {
    "text": lambda _, __: True,
    "path": lambda _, __: True,
    "int": _is_int,
    "share": _is_share,
    "fraction": lambda parameter, value: _is_share(parameter, value) and float(value) < 1,
    "bool": lambda _, value: value in {"true", "True", "TRUE", "1", "false", "False", "FALSE", "0"},
    "flag": lambda _, value: value.lower() in _WORDS,
    "choice": lambda parameter, value: value in parameter.values,
    "ints": lambda _, value: re.fullmatch(_INTS, value, re.ASCII) is not None,
    "groups": lambda _, value: re.fullmatch(f"{_INTS}(;{_INTS})*", value, re.ASCII) is not None,
}


def _expected(parameter: BackendParameter) -> str:
    return {
        "int": "a whole number" + ("" if parameter.least is None else f", at least {parameter.least}"),
        "share": "a number above 0 and at most 1",
        "fraction": "a number above 0 and below 1",
        "bool": "true or false",
        "flag": "true or false",
        "choice": "one of " + ", ".join(parameter.values),
        "ints": "whole numbers between commas",
        "groups": "whole numbers, a comma inside an instance and a semicolon between instances",
    }.get(parameter.kind, "text")
