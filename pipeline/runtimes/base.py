"""What differs between the runtimes, behind one small protocol.

A runtime knows how its engine is built from a checkpoint and which Triton layout serves it. Everything before that
(fetch, dataset, calibrate, evaluate) is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class Engines:
    """What a Triton repository is packaged from; each is the folder of an artifact."""

    target: Path  # build.target
    draft: Path | None  # build.draft
    tokenizer: Path  # fetch.target


class Runtime(Protocol):
    """One way to execute a model behind Triton."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions whose versions change what `build` makes."""

    def build_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        """What `build` depends on besides the checkpoint."""

    def build(self, recipe: Recipe, checkpoint: Path, into: Path, progress: Progress) -> Mapping[str, Json]:
        """Make the engine of one checkpoint in the empty folder `into`; return the facts of it."""

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        """What `package` depends on besides the engines: limits, parameters, digests of the model sources."""

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:
        """Make `into/model_repository` and `into/deployment.json`; return the facts of them."""


def runtime_of(recipe: Recipe) -> Runtime:
    """The runtime that the recipe names."""
    if recipe.runtime.kind == "cpu":
        from pipeline.runtimes.cpu.runtime import CpuRuntime

        return CpuRuntime()
    return _WithoutEngines()


class _WithoutEngines:
    """`tensorrt` and `pytorch` so far: everything up to `evaluate`, and a refusal to build."""

    packages = ()

    def build_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        return {"runtime": recipe.runtime.kind}

    def build(self, recipe: Recipe, checkpoint: Path, into: Path, progress: Progress) -> Mapping[str, Json]:  # noqa: ARG002
        raise UserError(
            f"recipe {recipe.name}: this version of pipeline does not build engines for runtime.kind = "
            f"{recipe.runtime.kind}; it fetches, calibrates and evaluates for it: pipeline build --until evaluate"
        )

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:  # noqa: ARG002
        return {}

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:  # noqa: ARG002
        raise AssertionError("nothing is packaged where nothing is built")
