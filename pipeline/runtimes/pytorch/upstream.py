"""Arguments of a recipe beside upstream's configuration of the model, and why each differs.

Configurations and reasons are data (`contracts/data/curated.yaml`; its header says how to add one). A reason holds for
the values of the packaged recipe: of a copy, what has changed since is not explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contracts import read_facts
from pipeline.errors import UserError
from pipeline.printable import json_text
from pipeline.recipe import HubSource, PyTorchRuntime, Recipe, load_recipe, packaged
from pipeline.runtimes.pytorch.artifact import llm_arguments


@dataclass(frozen=True, slots=True)
class UpstreamConfiguration:
    """Arguments of trtllm-serve as upstream keeps them.

    Attributes:
        file: Path in NVIDIA/TensorRT-LLM, and the commit.
        models: Repositories of the Hub that it is for.
        gpus: GPUs that it is for, as upstream names them.
        arguments: As in the file.
    """

    name: str
    file: str
    models: tuple[str, ...]
    gpus: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UpstreamDifference:
    """An argument that upstream and a recipe do not have alike, as JSON; None where it is left out."""

    key: str
    upstream: str | None
    here: str | None
    why: str  # empty: not explained


@dataclass(frozen=True, slots=True)
class UpstreamComparison:
    """A recipe beside the configuration that it follows; `without` says why there is none."""

    configuration: UpstreamConfiguration | None
    same: tuple[str, ...] = ()
    differences: tuple[UpstreamDifference, ...] = ()
    without: str = ""


def configurations() -> tuple[UpstreamConfiguration, ...]:
    """List upstream's configurations that are known."""
    return tuple(
        UpstreamConfiguration(
            entry["name"], entry["file"], tuple(entry["models"]), entry["gpus"], entry["arguments"]
        )
        for entry in _data()["configurations"]
    )


def compare_with_upstream(recipe: Recipe) -> UpstreamComparison:
    """Compare arguments with the configuration that a packaged recipe follows, or the first one for the model.

    Raises:
        UserError: The recipe is for another runtime, upstream has none for its model, or the arguments are refused.
    """
    if not isinstance(recipe.runtime, PyTorchRuntime):
        raise UserError(
            f"recipe {recipe.name}: runtime.kind = {recipe.runtime.kind}: upstream's configurations are for pytorch"
        )
    entry = _data()["recipes"].get(recipe.name, {})
    if "without" in entry:
        return UpstreamComparison(None, without=entry["without"])
    follows = _followed(recipe, entry.get("follows"))
    own, upstream = _written_out(llm_arguments(recipe)), _written_out(follows.arguments)
    explained = entry.get("why", {})
    packed = _written_out(llm_arguments(load_recipe(packaged()[recipe.name]))) if explained else {}
    same, differences = [], []
    for key in dict.fromkeys([*upstream, *own]):
        own_value, upstream_value = own.get(key), upstream.get(key)
        if own_value == upstream_value:
            same.append(key)
            continue
        why = explained.get(key, "") if packed.get(key) == own_value else ""
        differences.append(UpstreamDifference(key, upstream_value, own_value, why or _always(key, own_value)))
    return UpstreamComparison(follows, tuple(same), tuple(differences))


def _followed(recipe: Recipe, name: str | None) -> UpstreamConfiguration:
    source = recipe.model.source
    repo = source.repo if isinstance(source, HubSource) else ""
    for configuration in configurations():
        if configuration.name == name or (name is None and repo in configuration.models):
            return configuration
    known = sorted({model for configuration in configurations() for model in configuration.models})
    raise UserError(
        f"recipe {recipe.name}: model.source = {source}: upstream's configurations that are known are for "
        f"{', '.join(known)}"
    )


def _always(key: str, own: str | None) -> str:
    """A reason that holds for every recipe."""
    for entry in _data()["always"]:
        if entry["key"] == key and ("here" not in entry or json_text(entry["here"]) == own):
            return str(entry["why"])
    return ""


def _written_out(values: Mapping[str, Any]) -> dict[str, str]:
    """Arguments by dotted paths, as JSON, and the defaults of those that are left out."""
    return {key: json_text(value) for key, value in (_data()["defaults"] | dict(_flat(values))).items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield arguments by dotted paths, under the names that releases have now."""
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield _data()["names"].get(path, path), value


def _data() -> Mapping[str, Any]:
    return read_facts("curated.yaml")
