"""The five models of TensorRT-LLM's Triton repository: tensors, ensemble maps and parameters, by version.

The facts are data (`data/inflight_batcher/*.yaml`, each with its source); its index says what the kinds of parameters
mean. This renders nothing and knows nothing about a recipe. A version is added by adding data.

The C++ backend takes its default, with no more than a warning, where it cannot read a parameter, so `check` is what
stands between a typo and a server that does something else.

>>> [tensor.name for tensor in tensors("postprocessing", "1.2.1").inputs]
['TOKENS_BATCH', 'SEQUENCE_LENGTH']
>>> check("1.2.1", "postprocessing", {"tokenizer_dir": "1/tokenizer", "skip_special_tokens": "maybe"})
['postprocessing: skip_special_tokens = maybe: must be true or false']
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.contracts import read_facts, record
from pipeline.contracts.version_range import entries_in
from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output, as config.pbtxt declares it (dims without the batch; -1 is any length)."""

    name: str
    data_type: str  # TYPE_INT32, …
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None  # what the model sees instead of dims
    allow_ragged_batch: bool = False


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All tensors of a model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class DataTypes:
    """Types that a repository chooses to suit its engine."""

    logits_datatype: str = "TYPE_FP32"
    encoder_input_features_data_type: str = "TYPE_FP16"
    prompt_embedding_table_data_type: str = "TYPE_FP16"


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of the ensemble; the maps go from the model's tensor to the ensemble's."""

    model: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


def versions() -> tuple[str, ...]:
    """Versions of TensorRT-LLM whose models are known, oldest first."""
    return tuple(_data("index")["versions"])


def models() -> tuple[str, ...]:
    """Names of the models, in the order in which text passes them."""
    return tuple(_data("index")["models"])


def tensors(model: str, version: str, data_types: DataTypes | None = None) -> ModelTensors:
    """List inputs and outputs of a model in a version, in upstream's order."""
    data = _model_facts(model)
    chosen = data_types or DataTypes()
    return ModelTensors(
        inputs=tuple(_tensor(entry, chosen) for entry in _entries(data["input"], version)),
        outputs=tuple(_tensor(entry, chosen) for entry in _entries(data["output"], version)),
    )


def ensemble_steps(version: str) -> tuple[EnsembleStep, ...]:
    """List the models that the ensemble runs, and how tensors pass between them.

    An entry of the maps is left out where the version lacks the tensor.
    """
    steps = []
    for step in _model_facts("ensemble")["steps"]:
        have = tensors(step["model"], version)
        inputs = {tensor.name for tensor in have.inputs}
        outputs = {tensor.name for tensor in have.outputs}
        steps.append(
            EnsembleStep(
                model=step["model"],
                input_map={name: to for name, to in step["input_map"].items() if name in inputs},
                output_map={name: to for name, to in step["output_map"].items() if name in outputs},
            )
        )
    return tuple(steps)


def _tensor(entry: Mapping[str, Any], chosen: DataTypes) -> TensorSpec:
    data_type = entry["data_type"]
    if not data_type.startswith("TYPE_"):
        allowed = _data("index")["data_types"][data_type]
        name, data_type = data_type, getattr(chosen, data_type)
        if data_type not in allowed:
            raise UserError(f"{name} = {data_type}: must be one of {', '.join(allowed)}")
    return record(TensorSpec, {**entry, "data_type": data_type})


def _model_facts(name: str) -> Mapping[str, Any]:
    """Return all facts of a model, as they are in its file."""
    if name not in models():
        near = difflib.get_close_matches(name, models(), n=3, cutoff=0.4) or models()
        raise UserError(f"{name} is not a model of the repository; known: {', '.join(near)}")
    return _data(name)


def _entries(entries: Sequence[Mapping[str, Any]], version: str) -> Iterator[Mapping[str, Any]]:
    return entries_in(entries, version, versions())


def _data(name: str) -> Mapping[str, Any]:
    return read_facts(f"inflight_batcher/{name}.yaml")


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
    needed_with: Mapping[str, str] = field(default_factory=dict)  # values of others that make it needed


def parameters(model: str, version: str) -> dict[str, BackendParameter]:
    """List the parameters that a model reads in a version, in upstream's order."""
    entries = _entries(_model_facts(model)["parameters"], version)
    return {
        entry["name"]: record(BackendParameter, {**entry, "needed_with": entry.get("with", {})})
        for entry in entries
    }


def check(version: str, model: str, values: Mapping[str, str], own: Collection[str] = ()) -> list[str]:
    """List every fault of a model's parameters, one line each; empty if the model would load with just these values.

    `own`: parameters that our own source of the model reads besides upstream's.
    """
    return [f"{model}: {fault}" for fault in _faults(parameters(model, version), values, own)]


def _faults(
    known: Mapping[str, BackendParameter], values: Mapping[str, str], own: Collection[str]
) -> Iterator[str]:
    for name in values:
        if name not in known and name not in own:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name}: is not read by this version" + (f"; did you mean {near[0]}?" if near else "")
    for name, parameter in known.items():
        value = values.get(name)
        if value is None:
            if parameter.needed:
                yield f"{name}: is missing, and the model does not load without it"
            elif parameter.needed_with and parameter.needed_with.items() <= values.items():
                conditions = ", ".join(f"{other} = {is_}" for other, is_ in parameter.needed_with.items())
                yield f"{name}: is missing, and {conditions} needs it"
        elif not value:
            if parameter.needed != "key":
                yield f"{name}: is empty; give it a value" + ("" if parameter.needed else ", or leave it out")
        elif "${" in value:
            yield f"{name} = {value}: a placeholder is left"
        elif not _READERS[parameter.kind](parameter, value):
            yield f"{name} = {value}: must be {_expected(parameter)}"


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
