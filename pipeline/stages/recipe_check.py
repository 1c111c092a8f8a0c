"""All that can be said against a recipe without a download or a store: what `recipes validate` prints.

Of this machine only the folders and files that the recipe names are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.plan.model_facts import ModelFacts, checkpoints_of, known_models
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.plan.preflight import Finding, GeneratedConfig, findings, refuse
from pipeline.plan.preflight.context import DatasetFacts
from pipeline.recipe import Checkpoint, LocalSource, Recipe
from pipeline.runtimes.base import runtime_of
from pipeline.stages.dataset.definition import read_definition
from pipeline.stages.fetch.local import chosen_files
from pipeline.store import Json

Settings = Mapping[str, Json]


def judge(recipe: Recipe) -> tuple[Finding, ...]:
    """What is to be known of a recipe that is not refused.

    Raises:
        InvalidInput: what it asks for does not exist, or its runtime cannot be told so; with all that is known.
    """
    return refuse(
        recipe, findings(recipe, _with_folders(known_models(recipe), recipe), emitted=emission(recipe))
    )


def emission(recipe: Recipe) -> GeneratedConfig:
    """What the runtime will write, and what it refuses when it works that out."""
    runtime, refusals = runtime_of(recipe), list[Fault]()
    roles = (TARGET,) if recipe.draft is None else (TARGET, DRAFT)
    build = {role: _worked_out(partial(runtime.build_settings, recipe, role), refusals) for role in roles}
    package = _worked_out(partial(runtime.package_settings, recipe), refusals)
    emitted = {role: found for role, found in build.items() if found}
    return GeneratedConfig(emitted, package, _once(refusals), _dataset(recipe))


def _with_folders(known: Mapping[str, ModelFacts], recipe: Recipe) -> dict[str, ModelFacts]:
    """The same, and of local folders why a build would not take them."""
    return {
        role: replace(known[role], problem=_problem(checkpoint))
        for role, checkpoint in checkpoints_of(recipe).items()
    }


def _problem(checkpoint: Checkpoint) -> str:
    source = checkpoint.source
    if not isinstance(source, LocalSource):
        return ""
    try:
        chosen_files(source.path, allow_pickle=checkpoint.allow_pickle)
    except InvalidInput as error:
        return "; ".join(map(str, error.faults))
    except UserError as error:
        return str(error).removeprefix(f"{source}:").removeprefix(str(source)).strip()
    return ""


def _dataset(recipe: Recipe) -> DatasetFacts | None:
    """What would be calibrated on. Of a file of the user's, the first line tells what kind it is."""
    calibration = recipe.quantization.calibration
    if calibration is None:
        return None
    dataset = calibration.dataset
    try:
        if isinstance(dataset, LocalSource):
            return _file_facts(dataset.path)
        return DatasetFacts(conversations=read_definition(dataset.name).column is None)
    except UserError as error:
        return DatasetFacts(str(error))


def _file_facts(path: Path) -> DatasetFacts:
    if not path.is_file():
        return DatasetFacts("is a folder, not a file" if path.is_dir() else "there is no such file")
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), "null"))
    except (OSError, ValueError, RecursionError):  # whoever reads all of it says what is wrong
        return DatasetFacts()
    return DatasetFacts(conversations=isinstance(first, dict) and "messages" in first)


def _worked_out(settings: Callable[[], Settings], refusals: list[Fault]) -> Settings:
    """The settings; nothing, and the reasons among the refusals, if there cannot be any."""
    try:
        return settings()
    except InvalidInput as error:
        refusals += error.faults
    except UserError as error:
        refusals.append(Fault(str(error)))
    return {}


def _once(faults: list[Fault]) -> tuple[Fault, ...]:
    """What target, draft and package are refused for alike."""
    return tuple({str(fault): fault for fault in faults}.values())
