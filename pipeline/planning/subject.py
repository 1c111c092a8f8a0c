"""What the rules of `compatibility` look at: a recipe, its models one by one, and the sizes that are known of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.models import ModelSizes, known_model
from pipeline.planning.parallelism import Parallelism, parallelism
from pipeline.planning.plan import DRAFT, TARGET
from pipeline.recipe import Checkpoint, HubSource, PyTorchRuntime, Recipe, TensorRTRuntime


@dataclass(frozen=True, slots=True)
class Model:
    """The target or the draft of a recipe."""

    role: str  # "target" | "draft"
    source_key: str  # "model.source"
    format_key: str  # "quantization.format"
    tensor_key: str  # "runtime.tensor_parallel"
    format: str
    kv_cache: str  # auto | fp8 | int8
    split: Parallelism
    sizes: ModelSizes | None  # None: not known before the checkpoint is here
    is_head: bool  # an Eagle-3 head, which is part of the target's engine


@dataclass(frozen=True, slots=True)
class Subject:
    """One recipe."""

    recipe: Recipe
    models: tuple[Model, ...]  # the target first

    @property
    def target(self) -> Model:
        return self.models[0]

    @property
    def draft(self) -> Model | None:
        return self.models[1] if len(self.models) > 1 else None

    @property
    def kind(self) -> str:
        """runtime.kind"""
        return self.recipe.runtime.kind

    @property
    def gpu_runtime(self) -> TensorRTRuntime | PyTorchRuntime | None:
        """The runtime's settings, if it is one of TensorRT-LLM."""
        runtime = self.recipe.runtime
        return runtime if isinstance(runtime, TensorRTRuntime | PyTorchRuntime) else None

    @property
    def sized(self) -> tuple[tuple[Model, ModelSizes], ...]:
        """The models whose sizes are known."""
        return tuple((model, model.sizes) for model in self.models if model.sizes is not None)


def subject(recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> Subject:
    """The recipe as rules see it; `sizes`: role -> what is known."""
    models = [_target(recipe, sizes.get(TARGET))]
    if recipe.draft is not None:
        models.append(_draft(recipe, sizes.get(DRAFT)))
    return Subject(recipe, tuple(models))


def known_sizes(recipe: Recipe) -> dict[str, ModelSizes]:
    """Role -> sizes, of the models whose sizes can be had offline: from the contracts, or a local config.json."""
    checkpoints: dict[str, Checkpoint] = {TARGET: recipe.model}
    if recipe.draft is not None:
        checkpoints[DRAFT] = recipe.draft
    found = {role: _sizes(checkpoint) for role, checkpoint in checkpoints.items()}
    return {role: sizes for role, sizes in found.items() if sizes is not None}


def _sizes(checkpoint: Checkpoint) -> ModelSizes | None:
    if isinstance(checkpoint.source, HubSource):
        return known_model(checkpoint.source.repo)
    return sizes_in(checkpoint.source.path)


def sizes_in(folder: Path) -> ModelSizes | None:
    """What the config.json of a checkpoint says; None if it cannot be read, which fetching it explains."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return ModelSizes.from_config(config) if isinstance(config, dict) else None


def _target(recipe: Recipe, sizes: ModelSizes | None) -> Model:
    return Model(
        role=TARGET,
        source_key="model.source",
        format_key="quantization.format",
        tensor_key="runtime.tensor_parallel",
        format=recipe.quantization.format,
        kv_cache=_kv_cache(recipe, recipe.quantization.format),
        split=parallelism(recipe, TARGET),
        sizes=sizes,
        is_head=False,
    )


def _draft(recipe: Recipe, sizes: ModelSizes | None) -> Model:
    assert recipe.draft is not None, "the caller looked"
    own_ranks = recipe.runtime.kind == "tensorrt"
    return Model(
        role=DRAFT,
        source_key="draft.source",
        format_key="draft.quantization",
        tensor_key="draft.tensor_parallel" if own_ranks else "runtime.tensor_parallel",
        format=recipe.draft.quantization,
        kv_cache=_kv_cache(recipe, recipe.draft.quantization),
        split=parallelism(recipe, DRAFT),
        sizes=sizes,
        is_head=recipe.draft.method == "eagle3",
    )


def _kv_cache(recipe: Recipe, form: str) -> str:
    """An engine takes the format from its calibrated checkpoint; the LLM API is told."""
    scaled = form != "none" or recipe.runtime.kind == "pytorch"
    return recipe.quantization.kv_cache if scaled else "auto"
