"""Protocol of the runtimes.

A runtime knows how its engine is built from a checkpoint and which Triton layout serves it. Everything before that
(fetch, dataset, calibrate, evaluate) is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pipeline.models.sizes import ModelSizes
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.store import Json
from pipeline.triton.deployment import ENTRY, Deployment, DeploymentLimits


@dataclass(frozen=True, slots=True)
class Engines:
    """Folders of the artifacts that a Triton repository is packaged from."""

    target: Path  # build.target
    draft: Path | None  # build.draft
    tokenizer: Path  # fetch.target
    adapters: Mapping[str, Path] = field(default_factory=dict)  # fetch.adapter.NAME, by name


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    """Executor of an engine's builder: this machine, a container on it, another machine."""

    name: Literal["auto", "native", "docker", "print", "print-all", "adopt"] = "auto"
    deadline_s: float | None = None  # for one engine; None: none
    devices: tuple[int, ...] = ()  # GPUs that may be used; empty: those that the builder finds
    folder: Path | None = None  # for adopt: what was built elsewhere


AUTO = ExecutorChoice()


@dataclass(frozen=True, slots=True)
class EngineBuildRequest:
    """Inputs of one engine's build."""

    recipe: Recipe
    role: str  # "target" | "draft"
    checkpoint: Path  # Hugging Face layout: the calibrated export, or the source
    ranks: Path | None  # TensorRT-LLM checkpoint, split for the ranks; only for `tensorrt`
    caches: Path  # folder of the store that outlives artifacts
    reports: Path  # folder of the store for the logs of builders
    executor: ExecutorChoice  # who runs the builder, for runtimes that leave the choice
    into: Path  # an empty folder
    progress: Progress


def preview(recipe: Recipe, models: Sequence[str], limits: DeploymentLimits, **known: Any) -> Deployment:
    """Return the deployment.json of a package that is not made yet; the tokenizer's ids and the digest are empty.

    Args:
        models: Triton models, in the order in which text passes them.
        **known: Requirements and start of the server, where the runtime has them.
    """
    return Deployment(
        name=recipe.name,
        runtime=recipe.runtime.kind,
        entry_model=ENTRY if ENTRY in models else models[0],
        models=tuple(models),
        limits=limits,
        tokenizer_dir="",
        end_id=0,
        pad_id=0,
        stop_token_ids=(),
        digest="",
        versions={},
        **known,
    )


class Runtime(Protocol):
    """One way to execute a model behind Triton."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions whose versions change what `build` makes."""

    def build_settings(self, recipe: Recipe, role: str) -> Mapping[str, Json]:
        """Settings that `build` depends on besides the checkpoint: part of the engine's key in the store.

        Args:
            role: `target` or `draft`.
        """

    def build(self, inputs: EngineBuildRequest) -> Mapping[str, Json]:
        """Make one engine in the empty folder `inputs.into`.

        Returns:
            Facts for the engine's manifest.
        """

    def preview_deployment(self, recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> Deployment:
        """Predict the deployment.json of a package before it is built, as far as launching depends on it.

        Fields that need the built engines and the tokenizer (token ids, digest) are empty, and the size of the weights
        is estimated.

        Args:
            sizes: Role -> sizes of its model, where they are known.

        Raises:
            UserError: It depends on sizes that are not known.
        """

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        """Settings that `package` depends on besides the engines: part of the package's key in the store.

        These are limits, parameters, and digests of the sources of the Triton models.
        """

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:
        """Make a package.

        Args:
            into: An empty folder; gets model_repository/ and deployment.json.

        Returns:
            Facts for the package's manifest.
        """
