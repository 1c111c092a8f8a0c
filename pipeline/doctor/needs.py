"""What a recipe needs of this Python, of the hub and of programs, to be built: what no rule of preflight judges.

Pure: a recipe and what was found in, obstacles out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.doctor.report import Obstacle
from pipeline.machine.inventory import Inventory
from pipeline.machine.packages import Extra
from pipeline.plan.plan import REVISIONS
from pipeline.prepare.packages_needed import needs_of_stage
from pipeline.recipe import HubSource, Recipe, TensorRTRuntime


def hub_repositories(recipe: Recipe) -> dict[str, str | None]:
    """Repository -> revision, of the models that come from the hub."""
    asked = [recipe.model, *([recipe.draft] if recipe.draft is not None else [])]
    return {one.source.repo: one.revision for one in asked if isinstance(one.source, HubSource)}


def extras_to_build(recipe: Recipe) -> tuple[str, ...]:
    """The extras that a build imports; "" is what every part needs."""
    needed = (need.extra for stage in REVISIONS for need in needs_of_stage(recipe, stage))
    return tuple(dict.fromkeys(("", *needed)))


def packages(names: Sequence[str], extras: Sequence[Extra]) -> Iterator[Obstacle]:
    """What is not installed of some extras."""
    for extra in extras:
        if extra.name in names and extra.lacking:
            lacking = ", ".join(
                f"{one.name}{one.wanted} is missing" if one.installed is None
                else f"{one.name} is {one.installed}, wanted is {one.wanted}"
                for one in extra.lacking
            )  # fmt: skip
            yield Obstacle("packages", lacking, extra.install)


def hub(recipe: Recipe, found: Inventory, in_store: Mapping[str, int]) -> Iterator[Obstacle]:
    """Models that would have to be downloaded, and cannot be. `in_store`: repositories that are there already."""
    if found.hub is None or in_store.keys() >= hub_repositories(recipe).keys():
        return
    if found.hub.offline:
        yield Obstacle("hub", "HF_HUB_OFFLINE is set, and the store lacks the model", "unset HF_HUB_OFFLINE")
    elif found.hub.problem:
        fix = "set HF_ENDPOINT to a mirror that this machine reaches, or HTTPS_PROXY"
        yield Obstacle("hub", f"{found.hub.problem}; the store lacks the model", fix)


def engine_builder(recipe: Recipe, found: Inventory) -> Iterator[Obstacle]:
    """Who would run trtllm-build: this machine, or a container on it."""
    runtime = recipe.runtime
    if not isinstance(runtime, TensorRTRuntime):
        return
    native = _native_builder(runtime.version, found)
    docker = found.docker.problem if found.docker is not None else ""
    if native and docker:
        fix = "start Docker, or pipeline build RECIPE --executor print for a machine that can"
        yield Obstacle("trtllm-build", f"{native}; {docker}", fix)


def _native_builder(version: str, found: Inventory) -> str:
    """Why trtllm-build does not run here; empty if it does."""
    if found.builder is None:
        return ""
    if found.builder.path is None:
        return "there is no trtllm-build on PATH"
    if found.builder.version not in (None, version):
        return f"trtllm-build is of TensorRT-LLM {found.builder.version}, the recipe wants {version}"
    return ""
