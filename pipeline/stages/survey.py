"""Look at the world once, before planning: resolve sources, hash what is local, ask for versions.

This is where a plan's inputs come from; `planning.make_plan` itself touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipeline.planning.plan import DRAFT, TARGET, Plan, Step, Surroundings, make_plan
from pipeline.planning.preflight import Emission, Finding, allow, findings, refuse, said
from pipeline.progress import Progress, Silent
from pipeline.recipe import Recipe
from pipeline.runtimes.base import AUTO, ExecutorChoice, Runtime, runtime_of
from pipeline.stages.builder import demanded
from pipeline.stages.dataset import identity
from pipeline.stages.fetch import ResolvedSource, resolve
from pipeline.stages.fitness import Making, judge_fit
from pipeline.stages.judging import emission
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
    findings: tuple[Finding, ...]  # of preflight, none of which stops the build
    emitted: Emission
    allowed: frozenset[str]  # rules whose errors are let pass

    def work(
        self, progress: Progress, store: Store, executor: ExecutorChoice = AUTO, until: str = "package"
    ) -> Callable[[Step, Mapping[str, Path], Path], Work]:
        """What the builder hands to the stage of a step.

        Args:
            executor: see `runtimes.base.Order`.
            until: the last step that is wanted; the machine is held against all that is still to be made for it.
        """

        def work(step: Step, inputs: Mapping[str, Path], into: Path) -> Work:
            role = step.name.partition(".")[2]
            making = frozenset(one.stage for one, _, needed in demanded(self.plan, store, until) if needed)
            found = judge_fit(
                self.plan, store, self.emitted, self.allowed, Making(making, executor, self.sources)
            )
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
                findings=found,
            )

        return work


def prepare(
    recipe: Recipe,
    store: Store,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
) -> Prepared:
    """Resolve what the recipe names and plan its build. What is doubtful about it is said, too.

    Args:
        allowed: rules of preflight whose errors are let pass, as `preflight.allowance` takes them.

    Raises:
        InvalidInput: what the recipe asks for does not exist, or does not fit; SourceError: a checkpoint cannot be had.
    """
    emitted = emission(recipe)
    refuse(recipe, allow(findings(recipe, emitted=emitted), allowed))
    checkpoints = {TARGET: recipe.model} | ({DRAFT: recipe.draft} if recipe.draft is not None else {})
    sources = {
        role: resolve(checkpoint, store=store, offline=offline, progress=progress)
        for role, checkpoint in checkpoints.items()
    }
    around = Surroundings(
        sources={role: source.identity for role, source in sources.items()},
        dataset=_dataset_identity(recipe),
        tools=tool_versions(runtime_of(recipe)),
        build=emitted.build,
        package=emitted.package,
    )
    plan = make_plan(recipe, around)
    found = judge_fit(plan, store, emitted, allowed)
    for line in said(found):
        (progress or Silent()).say(line)
    return Prepared(plan, sources, found, emitted, allowed)


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
