"""What is known of the models of a recipe before, or after, they are here. Reads a local config.json, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.models import ModelSizes, known_model
from pipeline.planning.plan import DRAFT, TARGET
from pipeline.planning.tokenizer_facts import TokenizerFacts
from pipeline.reading import UnreadableFile, read_json
from pipeline.recipe import Checkpoint, HubSource, Recipe


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model. None: not known, and rules that need it say nothing."""

    sizes: ModelSizes | None = None
    tokenizer: TokenizerFacts | None = None
    weight_bytes: int | None = None  # of the published weights, all files together
    access: int | None = None  # HTTP status with which the hub answers for its files; None: nobody asked


def known_models(recipe: Recipe) -> dict[str, ModelFacts]:
    """Role -> what can be known offline: sizes from the contracts, or from a local config.json."""
    return {role: ModelFacts(sizes) for role, sizes in known_sizes(recipe).items()}


def known_sizes(recipe: Recipe) -> dict[str, ModelSizes]:
    """Role -> sizes, of the models whose sizes can be had offline: from the contracts, or a local config.json."""
    checkpoints: dict[str, Checkpoint] = {TARGET: recipe.model}
    if recipe.draft is not None:
        checkpoints[DRAFT] = recipe.draft
    found = {role: _sizes(checkpoint) for role, checkpoint in checkpoints.items()}
    return {role: sizes for role, sizes in found.items() if sizes is not None}


def with_sizes(sizes: Mapping[str, ModelSizes]) -> dict[str, ModelFacts]:
    """Facts of which only the sizes are known."""
    return {role: ModelFacts(one) for role, one in sizes.items()}


def _sizes(checkpoint: Checkpoint) -> ModelSizes | None:
    if isinstance(checkpoint.source, HubSource):
        return known_model(checkpoint.source.repo)
    return sizes_in(checkpoint.source.path)


def sizes_in(folder: Path) -> ModelSizes | None:
    """What the config.json of a checkpoint says; None if it cannot be read, which fetching it explains."""
    try:
        return ModelSizes.from_config(read_json(folder / "config.json"))
    except UnreadableFile:
        return None
