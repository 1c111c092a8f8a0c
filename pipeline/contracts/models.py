"""Sizes of published models, by the name of their repository on the hub.

With them a recipe is judged, and its memory planned, before anything is downloaded. The facts are data
(`data/models/*.yaml`, each with its source); a model is added by adding data. Sizes of any other model are read from
its config.json (`pipeline.models.sizes`).

>>> known_model("meta-llama/Llama-3.1-8B-Instruct").kv_heads
8
>>> known_model("somebody/something") is None
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from pipeline.contracts import read_facts
from pipeline.models.sizes import ModelSizes


def known_model(repo: str) -> ModelSizes | None:
    """Return the sizes of a repository of the hub, or None if they are not among the data."""
    return _sizes(repo) if repo in _data() else None


def known_models() -> tuple[str, ...]:
    """List the repositories whose sizes are known, sorted."""
    return tuple(sorted(_data()))


def _files() -> Iterator[Mapping[str, Any]]:
    folder = resources.files("pipeline.contracts") / "data" / "models"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            yield read_facts(f"models/{file.name}")


@cache
def _sizes(repo: str) -> ModelSizes | None:
    return ModelSizes.from_config(_data()[repo])


@cache
def _data() -> Mapping[str, Mapping[str, Any]]:
    return {repo: entry for content in _files() for repo, entry in content["models"].items()}
