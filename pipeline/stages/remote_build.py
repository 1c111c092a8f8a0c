"""Builds that go on on another machine: the script for it, and taking what it made into the store.

Where only trtllm-build is missing here, the script builds the engines from checkpoints that are made here. Where an
earlier step cannot be made here either (no room, no memory, no network, distributions missing), the script has the
whole build done by `pipeline build` over there: names of artifacts say what they are made from, so its results are
taken here if, and only if, they are the ones that were planned.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pipeline import __version__
from pipeline.errors import SourceError, StoreError, UserError
from pipeline.machine.elsewhere import HandoverScript, adopt_commands, copy_result, require_result
from pipeline.machine.packages import read_python
from pipeline.plan.plan import DRAFT, TARGET, Plan, Step
from pipeline.prepare import Prepared
from pipeline.prepare.prepare import needs_of_stage
from pipeline.progress import Progress
from pipeline.recipe import LocalSource, Recipe
from pipeline.runtimes import ExecutorChoice
from pipeline.sources import HubCheckpoint, ResolvedSource
from pipeline.stages.builder import Builder, HandedOver, StepOutcome
from pipeline.store import Artifact, Json, Manifest, Store, gc, verify
from pipeline.store.manifest import FILE as MANIFEST

_STAGE = "build"


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
        return _hand_over(plan, store, until, partial(_write_all, prepared, until, arguments))
    builder = Builder(prepared, store, progress, executor, on_outcome)
    try:
        prepared.check(store, executor, until)
    except UserError as error:
        obstacle = error
    else:
        try:
            return builder.run(until)
        except HandedOver as handed:
            return _hand_over(plan, store, until, partial(_write_engines, plan, handed, arguments))
        except SourceError as error:
            obstacle = error
    if executor.name != "print" or plan.recipe.runtime.kind == "cpu":
        raise obstacle
    reason = "what comes before the engines cannot be made here, so that the script makes all of it"
    progress.say(f"{plan.recipe.name}: {reason}\n{textwrap.indent(str(obstacle), '  ')}")
    return _hand_over(plan, store, until, partial(_write_all, prepared, until, arguments))


def _hand_over(
    plan: Plan, store: Store, until: str, write: Callable[[Path], HandoverScript]
) -> HandoverScript:
    """Write the script, and keep from `store gc` what the build has and will get."""
    script = store.reports / f"{plan.recipe.name}-build.sh"
    awaited = gc.AwaitedBuild(
        recipe=plan.recipe.name,
        script=str(script),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        result=plan[until].key.name,
        artifacts=tuple(step.key.name for step in _up_to(plan, until)),
    )
    try:
        written = write(script)
        awaited.record(store)
    except OSError as error:
        raise StoreError(f"the store {store.root} cannot be written: {error.strerror}") from error
    return written


def _write_engines(plan: Plan, handed: HandedOver, arguments: str, path: Path) -> HandoverScript:
    """The script that builds engines from checkpoints of this store."""
    from pipeline.runtimes.tensorrt.executors.remote import RemoteEngine, write_engine_script

    engines = [RemoteEngine(step.name, step.key.name, job) for step, job in handed.jobs]
    return write_engine_script(path, plan.recipe.name, arguments, engines)


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


def _write_all(prepared: Prepared, until: str, arguments: str, path: Path) -> HandoverScript:
    """The script that makes everything, and needs nothing that is here but local checkpoints."""
    recipe = prepared.plan.recipe
    steps = _up_to(prepared.plan, until)
    results = [
        step for step in steps if step.name == until or (until == "package" and step.name == "evaluate")
    ]
    folders = [
        (result.name, result.key.name, f"$OUT/store/artifacts/{result.key.name}") for result in results
    ]
    tools = {name: version for step in steps for name, version in step.key.tools.items()}
    pins = [f"{name}=={version}" for name, version in sorted(tools.items()) if version != "absent"]
    needs = (need for step in steps for need in needs_of_stage(recipe, *step.name.split(".", 1)))
    names, following = tuple(result.name for result in results), adopt_commands(arguments, folders)
    return HandoverScript(path, names, f"{recipe.name}-build", following).write(
        __package__,
        "build.sh.j2",
        recipe=_settled(recipe, prepared.sources),
        title=f"The build of {recipe.name} by `pipeline build`: {', '.join(step.name for step in steps)}.",
        done="It is all in $OUT/store.",
        where=_where(recipe, steps),
        version=__version__,
        extras=tuple(dict.fromkeys(need.extra for need in needs)),
        requirements=pins,
        plan=steps,
        executor=_compiles(recipe, steps),
        locals=list(_locals(recipe)),
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


def _locals(recipe: Recipe) -> Iterator[tuple[str, str, Path]]:
    """Folders and files of this machine, which another may have elsewhere: key, variable of the script, and path."""
    draft, calibration = recipe.draft, recipe.quantization.calibration
    for key, variable, source in (
        ("model.source", "TARGET_CHECKPOINT", recipe.model.source),
        ("draft.source", "DRAFT_CHECKPOINT", draft and draft.source),
        ("quantization.calibration.dataset", "DATASET", calibration and calibration.dataset),
    ):
        if isinstance(source, LocalSource):
            yield key, variable, source.path


def _settled(recipe: Recipe, sources: Mapping[str, ResolvedSource]) -> dict[str, Json]:
    """All values of a recipe that a build reads, with the commits that its revisions mean now."""
    values = recipe.built_values()
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
        artifact = Artifact(folder, Manifest.load(folder))
    except StoreError as error:
        raise UserError(str(error)) from error
    require_result(folder, artifact.name, step.key.name)
    check = verify(artifact, progress)
    if not check.ok:
        raise UserError(f"{folder}: damaged on its way; copy it again ({check})")

    def make(into: Path) -> Mapping[str, Json]:
        copy_result(folder, artifact.manifest.files, into)
        return {**artifact.manifest.facts, "adopted": artifact.manifest.provenance.model_dump(mode="json")}

    size = artifact.manifest.total_bytes
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
