"""Look at the world once, before planning: resolve sources, hash what is local, ask for versions.

This is where a plan's inputs come from; `planning.make_plan` itself touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SourceError, UserError
from pipeline.machine.packages import Need, missing_text, pinned_version, version_of, wrong_python
from pipeline.plan.plan import DRAFT, TARGET, Plan, Step, Surroundings, make_plan
from pipeline.plan.preflight import Emission, Finding, allow, findings, refuse, said
from pipeline.progress import Progress, Silent
from pipeline.recipe import Recipe
from pipeline.runtimes.base import AUTO, ExecutorChoice, Runtime, runtime_of
from pipeline.stages.build_preflight import Making, judge_fit
from pipeline.stages.builder import Builder, demanded
from pipeline.stages.dataset import identity
from pipeline.stages.fetch import ResolvedSource, resolve
from pipeline.stages.model_probe import see_models
from pipeline.stages.packages_needed import needs_of_stage
from pipeline.stages.recipe_check import emission
from pipeline.stages.stage_registry import Work
from pipeline.store import Json, Store
from pipeline.triton.deployment import Deployment

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

    def check(
        self,
        store: Store,
        executor: ExecutorChoice = AUTO,
        until: str = "package",
        afterwards: Iterable[Need] = (),
    ) -> None:
        """Whether this machine can make all that the store lacks, up to a step; before any of it is made.

        Args:
            executor: who is to build engines; see `runtimes.base.Order`.
            afterwards: what else must be installed, because it is to run when all is made.

        Raises:
            UserError: distributions are missing, or nothing here builds engines; all of it in one text.
            InvalidInput: the machine lacks room, memory or GPUs.
        """
        steps = [step for step, _, needed in demanded(self.plan, store, until) if needed]
        recipe = self.plan.recipe
        needs = [need for step in steps for need in needs_of_stage(recipe, *step.name.split("."))]
        needs += afterwards
        faults = [fault] if (fault := wrong_python(needs)) else []
        if not faults and (missing := missing_text(needs)):
            faults = [f"distributions are not installed here:\n{missing}"]
        if recipe.runtime.kind == "tensorrt" and any(step.stage == "build" for step in steps):
            from pipeline.runtimes.tensorrt.executors import executor_of

            try:
                executor_of(executor).check(recipe.runtime.version)
            except UserError as error:
                faults.append(str(error))
        if faults:
            raise UserError("\n".join(f"{recipe.name}: {fault}" for fault in faults))
        judge_fit(self.plan, store, self.emitted, self.allowed, self._making(store, executor, until))

    def _making(self, store: Store, executor: ExecutorChoice, until: str) -> Making:
        stages = frozenset(one.stage for one, _, needed in demanded(self.plan, store, until) if needed)
        return Making(stages, executor, self.sources)

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
            making = self._making(store, executor, until)
            found = judge_fit(self.plan, store, self.emitted, self.allowed, making)
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


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The package of a recipe, built or not."""

    package: Path  # in the store, where it is or will be; UNKNOWN if nobody can tell
    deployment: (
        Deployment | None
    )  # what its deployment.json will say; None: the package is there and says it itself
    note: str = ""  # why the folder is not known


UNKNOWN = Path("/PACKAGE")


def foresee(
    recipe: Recipe,
    store: Store,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
) -> Foreseen:
    """Where the package of a recipe is, or will be, and how it will be launched. Nothing is made.

    Raises:
        InvalidInput: the recipe asks for what does not exist. UserError: its model is not known, and neither the store
        nor the Hub tells of it. GateFailed: it is built, and its figures are over the recipe's budgets.
    """
    package, note = UNKNOWN, ""
    try:
        prepared = prepare(recipe, store, offline=offline, progress=progress, allowed=allowed)
        key = prepared.plan["package"].key
        if store.find(key) is not None:
            report = progress or Silent()
            return Foreseen(
                Builder(prepared.plan, store, prepared.work(report, store), report).finished().path, None
            )
        package = store.artifacts / key.name
    except SourceError as error:
        note = str(error)
    models = see_models(recipe, store, offline=offline)
    sizes = {role: seen.sizes for role, seen in models.items() if seen.sizes is not None}
    return Foreseen(package, runtime_of(recipe).foresee(recipe, sizes), note)


def tool_versions(runtime: Runtime) -> dict[str, dict[str, str]]:
    """Stage -> distribution -> version, as it enters the keys of artifacts.

    Of a distribution that is not installed it is the version that the extra pins: an artifact that another machine made
    with it is then found here, where nothing but its name is needed. "absent" stands where several versions would do.
    """
    wanted = {**_PACKAGES, "build": runtime.packages}
    return {stage: {name: _version(name) for name in names} for stage, names in wanted.items()}


def _version(distribution: str) -> str:
    """Without the local part (2.13.0+cpu), which says from which index a wheel came, and not what it computes on."""
    installed = version_of(distribution)
    if installed is None:
        return pinned_version(distribution) or "absent"
    return installed.partition("+")[0]


def _dataset_identity(recipe: Recipe) -> Mapping[str, Json]:
    calibration = recipe.quantization.calibration
    return {} if calibration is None else identity(calibration.dataset)
