"""Look at the world once, before planning: resolve sources, hash what is local, ask for versions.

This is where a plan's inputs come from; `planning.make_plan` itself touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipeline.planning.plan import DRAFT, TARGET, Plan, Step, Surroundings, make_plan
from pipeline.planning.preflight import findings, refuse
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.runtimes.base import AUTO, ExecutorChoice, Runtime, runtime_of
from pipeline.stages.dataset import identity
from pipeline.stages.fetch import ResolvedSource, resolve
from pipeline.stages.fitness import refuse_unfit
from pipeline.stages.makers import Work
from pipeline.store import Json, Store

# Distributions whose versions change what a stage makes. `build` is the runtime's own.
_PACKAGES = {
    "dataset": ("jinja2", "tokenizers"),
    "calibrate": ("nvidia-modelopt", "torch", "transformers"),
    "evaluate": ("torch",),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan, and what its stages need besides it."""

    plan: Plan
    sources: Mapping[str, ResolvedSource]  # role -> checkpoint

    def work(
        self, progress: Progress, store: Store, executor: ExecutorChoice = AUTO
    ) -> Callable[[Step, Mapping[str, Path], Path], Work]:
        """What the builder hands to the stage of a step; `executor`: see `runtimes.base.Order`."""

        def work(step: Step, inputs: Mapping[str, Path], into: Path) -> Work:
            role = step.name.partition(".")[2]
            if step.stage != "fetch":
                refuse_unfit(self.plan, store)
            return Work(
                recipe=self.plan.recipe,
                role=role,
                sources=self.sources,
                inputs=inputs,
                into=into,
                caches=store.caches,
                reports=store.reports,
                executor=executor,
                progress=progress,
            )

        return work


def prepare(
    recipe: Recipe, store: Store, *, offline: bool = False, progress: Progress | None = None
) -> Prepared:
    """Resolve what the recipe names and plan its build. What is doubtful about it is said, too.

    Raises:
        InvalidInput: what the recipe asks for does not exist; SourceError: a checkpoint cannot be had.
    """
    for finding in refuse(recipe, findings(recipe)):
        if finding.severity == "warning" and progress is not None:
            progress.say(f"warning: {finding}")
    runtime = runtime_of(recipe)
    checkpoints = {TARGET: recipe.model} | ({DRAFT: recipe.draft} if recipe.draft is not None else {})
    sources = {
        role: resolve(checkpoint, store=store, offline=offline, progress=progress)
        for role, checkpoint in checkpoints.items()
    }
    around = Surroundings(
        sources={role: source.identity for role, source in sources.items()},
        dataset=_dataset_identity(recipe),
        tools=tool_versions(runtime),
        build={role: runtime.build_settings(recipe, role) for role in checkpoints},
        package=runtime.package_settings(recipe),
    )
    plan = make_plan(recipe, around)
    refuse_unfit(plan, store)
    return Prepared(plan, sources)


def tool_versions(runtime: Runtime) -> dict[str, dict[str, str]]:
    """Stage -> distribution -> version; "absent" where it is not installed (the stage itself will say what to do)."""
    wanted = {**_PACKAGES, "build": runtime.packages}
    return {stage: {name: _version(name) for name in names} for stage, names in wanted.items()}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _dataset_identity(recipe: Recipe) -> Mapping[str, Json]:
    calibration = recipe.quantization.calibration
    return {} if calibration is None else identity(calibration.dataset)
