"""The five models of TensorRT-LLM's Triton repository: tensors and ensemble maps, by version.

The facts are data (`data/inflight_batcher/*.yaml`, each with its source); this answers from them. It renders
nothing and knows nothing about a recipe. A version is added by adding data.

>>> [tensor.name for tensor in tensors("postprocessing", "1.2.1").inputs]
['TOKENS_BATCH', 'SEQUENCE_LENGTH']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pipeline.contracts.version_range import unknown_version
from pipeline.errors import UserError
from pipeline.resources import parse_yaml


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
    """List inputs and outputs of a model in a version, in upstream's order.

    Raises:
        UserError: the model or the version is not known.
    """
    data = model_facts(model)
    chosen = data_types or DataTypes()
    return ModelTensors(
        inputs=tuple(_tensor(entry, chosen) for entry in entries_in(data["input"], version)),
        outputs=tuple(_tensor(entry, chosen) for entry in entries_in(data["output"], version)),
    )


def ensemble_steps(version: str) -> tuple[EnsembleStep, ...]:
    """List the models that the ensemble runs, and how tensors pass between them.

    An entry of the maps is left out where the version lacks the tensor.
    """
    steps = []
    for step in model_facts("ensemble")["steps"]:
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


def entries_in(entries: Sequence[Mapping[str, Any]], version: str) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a list of facts that hold in a version.

    Raises:
        UserError: the version is not known.
    """
    known = versions()
    if version not in known:
        raise unknown_version(version, known)
    at = known.index(version)
    for entry in entries:
        since, until = entry.get("since"), entry.get("until")
        if (since is None or known.index(since) <= at) and (until is None or at < known.index(until)):
            yield entry


def _tensor(entry: Mapping[str, Any], chosen: DataTypes) -> TensorSpec:
    data_type = entry["data_type"]
    if not data_type.startswith("TYPE_"):
        allowed = _data("index")["data_types"][data_type]
        name, data_type = data_type, getattr(chosen, data_type)
        if data_type not in allowed:
            raise UserError(f"{name} = {data_type}: must be one of {', '.join(allowed)}")
    reshape = entry.get("reshape")
    return TensorSpec(
        name=entry["name"],
        data_type=data_type,
        dims=tuple(entry["dims"]),
        optional=entry.get("optional", False),
        reshape=None if reshape is None else tuple(reshape),
        allow_ragged_batch=entry.get("allow_ragged_batch", False),
    )


def model_facts(name: str) -> Mapping[str, Any]:
    """Return all facts of a model, as they are in its file.

    Raises:
        UserError: the model is not known.
    """
    if name not in models():
        near = difflib.get_close_matches(name, models(), n=3, cutoff=0.4) or models()
        raise UserError(f"{name} is not a model of the repository; known: {', '.join(near)}")
    return _data(name)


@cache
def _data(name: str) -> Mapping[str, Any]:
    file = resources.files("pipeline.contracts") / "data" / "inflight_batcher" / f"{name}.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
