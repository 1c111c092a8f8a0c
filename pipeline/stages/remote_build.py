"""Builds that go on on another machine: the script for it, and taking what it made into the store.

Where only trtllm-build is missing here, the script builds the engines from checkpoints that are made here. Where an
earlier step cannot be made here either (no room, no memory, no network, distributions missing), the script has the
whole build done by `pipeline build` over there: names of artifacts say what they are made from, so its results are
taken here if, and only if, they are the ones that were planned.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline import __version__
from pipeline.documents import dump_yaml
from pipeline.errors import SourceError, StoreError, UserError
from pipeline.machine.packages import read_python
from pipeline.plan.plan import DRAFT, TARGET, Plan, Step
from pipeline.prepare import Prepared
from pipeline.prepare.prepare import needs_of_stage
from pipeline.progress import Progress
from pipeline.reading import open_file
from pipeline.recipe import SERVED_SECTIONS, LocalSource, Recipe
from pipeline.resources import shell_script, write_script
from pipeline.runtimes import ExecutorChoice
from pipeline.sources import HubCheckpoint, ResolvedSource
from pipeline.stages.builder import Builder, HandedOver, StepOutcome
from pipeline.store import Artifact, Json, Manifest, Store, files, gc, verify
from pipeline.store.manifest import FILE as MANIFEST

_STAGE = "build"


@dataclass(frozen=True, slots=True)
class HandoverScript:
    """The script that builds on another machine, and what is to be done afterwards."""

    path: Path
    waiting: tuple[Step, ...]  # that `pipeline adopt` will take
    following: tuple[str, ...]  # command lines for when it is done there


def build_or_hand_over(
    prepared: Prepared,
    store: Store,
    executor: ExecutorChoice,
    until: str,
    arguments: str,
    progress: Progress,
    on_outcome: Callable[[StepOutcome], None],
) -> Artifact | HandoverScript:
    """Make a step and all that it needs, or write the script with which another machine goes on.

    Args:
        executor: Who builds engines. With "print" the script is for the engines alone if this machine can make all
            that comes before them; with "print-all" nothing is made here.
        until: Name of the step.
        arguments: How recipe and store are called on the command line, quoted for a shell.
        on_outcome: Called once for each step that was found or made here.

    Returns:
        The artifact of the step, or the script.

    Raises:
        UserError: This machine cannot make it, and no script was asked for.
        GateFailed: The calibrated model is over the recipe's budget.
    """
    plan = prepared.plan
    if executor.name == "print-all":
        return _hand_over_all(prepared, store, until, arguments)
    builder = Builder(prepared, store, progress, executor, on_outcome)
    try:
        prepared.check(store, executor, until)
    except UserError as error:
        obstacle = error
    else:
        try:
            return builder.run(until)
        except HandedOver as handed:
            return _hand_over_engines(plan, handed, store, until, arguments)
        except SourceError as error:
            obstacle = error
    if executor.name != "print" or plan.recipe.runtime.kind == "cpu":
        raise obstacle
    reason = "what comes before the engines cannot be made here, so that the script makes all of it"
    progress.say(f"{plan.recipe.name}: {reason}\n{textwrap.indent(str(obstacle), '  ')}")
    return _hand_over_all(prepared, store, until, arguments)


def _hand_over_engines(
    plan: Plan, handed: HandedOver, store: Store, until: str, arguments: str
) -> HandoverScript:
    """The script that builds engines from checkpoints of this store."""
    from pipeline.runtimes.tensorrt.executors.remote import RemoteEngine, folder_name, render

    engines = [RemoteEngine(step.name, step.key.name, job) for step, job in handed.jobs]
    folder = folder_name(plan.recipe.name)
    folders = [(step, f"{folder}/{step.name.partition('.')[2]}") for step, _ in handed.jobs]
    return _printed(plan, store, until, render(plan.recipe.name, arguments, engines), folders, arguments)


def _hand_over_all(prepared: Prepared, store: Store, until: str, arguments: str) -> HandoverScript:
    """The script that makes everything, and needs nothing that is here but local checkpoints."""
    plan = prepared.plan
    steps = _up_to(plan, until)
    results = (
        [step for step in steps if step.name in ("evaluate", until)] if until == "package" else [plan[until]]
    )
    text = _render(prepared, steps, results, arguments, until)
    return _printed(plan, store, until, text, [(step, step.key.name) for step in results], arguments)


def _printed(
    plan: Plan, store: Store, until: str, text: str, folders: Sequence[tuple[Step, str]], arguments: str
) -> HandoverScript:
    """Write the script, and keep from `store gc` what the build has and will get.

    Args:
        folders: Steps to be adopted, each with its folder, as the script leaves it.
    """
    script = store.reports / f"{plan.recipe.name}-build.sh"
    awaited = gc.AwaitedBuild(
        recipe=plan.recipe.name,
        script=str(script),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        result=plan[until].key.name,
        artifacts=tuple(step.key.name for step in _up_to(plan, until)),
    )
    try:
        write_script(script, text)
        awaited.record(store)
    except OSError as error:
        raise StoreError(f"the store {store.root} cannot be written: {error.strerror}") from error
    adopting = [f"pipeline adopt {arguments} {step.name} {folder}" for step, folder in folders]
    return HandoverScript(
        script, tuple(step for step, _ in folders), (*adopting, f"pipeline build {arguments}")
    )


def _up_to(plan: Plan, until: str) -> list[Step]:
    """A step and all that it is made from; with a package the evaluation, which is its gate."""
    wanted: set[str] = set()
    waiting = [until, "evaluate"] if until == "package" and "evaluate" in plan else [until]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += plan[name].inputs.values()
    return [step for step in plan if step.name in wanted]


@dataclass(frozen=True, slots=True)
class _Local:
    """A folder or a file of this machine that a recipe names, which another machine may have elsewhere."""

    key: str  # of the recipe
    variable: str  # of the script
    path: str  # quoted for a shell


def _render(
    prepared: Prepared, steps: Sequence[Step], results: Sequence[Step], arguments: str, until: str
) -> str:
    recipe = prepared.plan.recipe
    tools = {name: version for step in steps for name, version in step.key.tools.items()}
    pins = [f"{name}=={version}" for name, version in sorted(tools.items()) if version != "absent"]
    needs = (need for step in steps for need in needs_of_stage(recipe, *step.name.split(".")))
    return shell_script(
        __package__,
        "build.sh.j2",
        title=f"The build of {recipe.name} by `pipeline build`: {', '.join(step.name for step in steps)}.",
        where=_where(recipe, steps),
        version=__version__,
        extras=tuple(dict.fromkeys(need.extra for need in needs)),
        requirements=pins,
        pins="".join(f" {shlex.quote(pin)}" for pin in pins),
        arguments=arguments,
        quoted_arguments=shlex.quote(arguments),
        results=results,
        plan=steps,
        folder=f"{recipe.name}-build",
        executor=_compiles(recipe, steps),
        locals=list(_locals(recipe)),
        recipe=dump_yaml(_settled(recipe, prepared.sources)),
        until=until,
        allowing="".join(f" --allow {rule}" for rule in sorted(prepared.allowed)),
    )


def _where(recipe: Recipe, steps: Sequence[Step]) -> str:
    python = f"a machine with Python {read_python().wanted}"
    if recipe.runtime.kind == "cpu" or not _compiles(recipe, steps):
        return f"{python}; no GPU is needed, though calibration is much faster on one"
    return (
        f"{python}, the GPU {recipe.runtime.gpu}, and TensorRT-LLM {recipe.runtime.version} (trtllm-build on PATH) or "
        "Docker with the\n#        NVIDIA Container Toolkit"
    )


def _compiles(recipe: Recipe, steps: Sequence[Step]) -> bool:
    return recipe.runtime.kind == "tensorrt" and any(step.stage == _STAGE for step in steps)


def _locals(recipe: Recipe) -> Iterable[_Local]:
    calibration = recipe.quantization.calibration
    named = {
        "model.source": ("TARGET_CHECKPOINT", recipe.model.source),
        "draft.source": ("DRAFT_CHECKPOINT", recipe.draft.source if recipe.draft is not None else None),
        "quantization.calibration.dataset": (
            "DATASET",
            calibration.dataset if calibration is not None else None,
        ),
    }
    for key, (variable, source) in named.items():
        if isinstance(source, LocalSource):
            yield _Local(key, variable, shlex.quote(str(source.path)))


def _settled(recipe: Recipe, sources: Mapping[str, ResolvedSource]) -> dict[str, Json]:
    """All values of a recipe that a build reads, with the commits that its revisions mean now."""
    values = recipe.model_dump(mode="json", exclude=set(SERVED_SECTIONS))
    for role, section in ((TARGET, "model"), (DRAFT, "draft")):
        source = sources.get(role)
        if isinstance(source, HubCheckpoint):
            values[section]["revision"] = source.commit
    return values


# The way back


def adopt(prepared: Prepared, name: str, folder: Path, store: Store, progress: Progress) -> Artifact:
    """Copy into the store what another machine made for a step.

    Its inputs, checksums, and all that an engine says of itself are checked as if it had been made here. The folder is
    left as it is.

    Args:
        name: Name of the step: "build.target".
        folder: An artifact of another store, or what a script of engines left for the step.

    Raises:
        UserError: There is no such step, the folder holds something else, or it was damaged on its way.
    """
    plan = prepared.plan
    if (folder / MANIFEST).is_file():
        return _adopt_artifact(plan, plan[name], folder, store, progress)
    choice = _check_engine(plan, name, folder)
    return Builder(prepared, store, progress, choice).run(name)


def _adopt_artifact(plan: Plan, step: Step, folder: Path, store: Store, progress: Progress) -> Artifact:
    try:
        given = Artifact(folder, Manifest.load(folder))
    except StoreError as error:
        raise UserError(str(error)) from error
    if given.digest != step.key.digest:
        raise UserError(
            f"{folder} is {given.name}, what is missing is {step.key.name}: it is of another step, or the recipe, a "
            "checkpoint or the tools have changed since; then print the script again"
        )
    check = verify(given, progress)
    if not check.ok:
        raise UserError(f"{folder}: damaged on its way; copy it again ({check})")

    def make(into: Path) -> Mapping[str, Json]:
        for file in given.manifest.files:
            target = into / file
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_file(folder / file) as source:
                if not files.clone(source, target):  # never a link: the folder stays its owner's
                    files.copy(source, target)
        return {**given.manifest.facts, "adopted": given.manifest.provenance.model_dump(mode="json")}

    size = given.manifest.total_bytes
    return store.obtain(step.key, make, recipe=plan.recipe.name, progress=progress, needs_bytes=size)


def _check_engine(plan: Plan, name: str, folder: Path) -> ExecutorChoice:
    """The choice that makes a build take the engine in a folder."""
    from pipeline.runtimes.tensorrt.executors.remote import check_folder

    steps = [step.name for step in plan if step.stage == _STAGE]
    runtime = plan.recipe.runtime
    if runtime.kind != "tensorrt" or plan[name].stage != _STAGE:
        raise UserError(
            f"{folder}: no {MANIFEST}: not an artifact of another store; what scripts of engines leave is taken as "
            f"{', '.join(steps)} of runtime.kind tensorrt"
        )
    check_folder(folder, plan[name].key.name, runtime.version)
    return ExecutorChoice("adopt", folder=folder)
