"""What the stages of a build import beyond the core, by extra, so that what is missing is said before a build begins.

A stage imports its libraries when it runs. What it imports is said here once, for `build`, and for `doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.machine.packages import Need
from pipeline.recipe import HubSource, NamedDataset, Recipe
from pipeline.sources.dataset import read_definition


def needs_of_stage(recipe: Recipe, stage: str, role: str = "") -> Iterator[Need]:
    """What making one artifact of a recipe imports; nothing for a stage that the recipe does without.

    Args:
        stage: fetch, dataset, calibrate, convert, evaluate, build or package.
        role: target or draft; "" stands for both.
    """
    step = f"{stage}.{role}" if role else stage
    calibrated = recipe.quantization.format != "none"
    match stage:
        case "fetch" if any(isinstance(source, HubSource) for source in _sources(recipe, role)):
            yield Need("hub", step)
        case "dataset" if calibrated or _calibrates_draft(recipe):
            yield from _needs_of_dataset(recipe, step)
        case "calibrate" if calibrated or _calibrates_draft(recipe):
            yield Need("calibrate", step)
        case "evaluate" if calibrated:
            yield Need("calibrate", step, frozenset({"tokenizers", "torch"}))
        case "build" | "package" if recipe.runtime.kind == "cpu":
            yield Need("cpu", step)


def _needs_of_dataset(recipe: Recipe, step: str) -> Iterator[Need]:
    calibration = recipe.quantization.calibration
    assert calibration is not None, "the recipe's rules ask for it with every format but none"
    packages = {"tokenizers"}
    if isinstance(calibration.dataset, NamedDataset):
        definition = read_definition(calibration.dataset.name)
        if definition.hub is not None:
            yield Need("hub", step)
        if definition.train.endswith(".parquet"):
            packages.add("pyarrow")
    yield Need("calibrate", step, frozenset(packages))


def _sources(recipe: Recipe, role: str) -> Iterator[object]:
    if role in ("", "target"):
        yield recipe.model.source
    if recipe.draft is not None and role in ("", "draft"):
        yield recipe.draft.source


def _calibrates_draft(recipe: Recipe) -> bool:
    return recipe.draft is not None and recipe.draft.quantization != "none"
