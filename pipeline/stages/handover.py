"""Engines that this machine does not build: their script for another one, and taking the result into the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import UserError
from pipeline.planning.plan import Plan, Step
from pipeline.recipe import Recipe
from pipeline.runtimes.base import ExecutorChoice
from pipeline.store import Store

if TYPE_CHECKING:
    from pipeline.runtimes.tensorrt.executors.job import BuildJob

_STAGE = "build"


class HandedOver(Exception):
    """A build stopped where another machine goes on. Not a failure."""

    def __init__(self, jobs: Sequence[tuple[Step, BuildJob]]) -> None:
        self.jobs = tuple(jobs)
        super().__init__(", ".join(step.name for step, _ in self.jobs))


def check_executor(choice: ExecutorChoice, recipe: Recipe, steps: Iterable[Step]) -> None:
    """Before a build begins: whether the executor can do those of its steps that it will be asked for.

    Raises:
        UserError: it cannot; the text says what would do.
    """
    if recipe.runtime.kind == "tensorrt" and any(step.stage == _STAGE for step in steps):
        from pipeline.runtimes.tensorrt.executors import executor_of

        executor_of(choice).check(recipe.runtime.version)


def write_script(plan: Plan, handed: HandedOver, store: Store, words: str) -> Path:
    """The script that builds the engines; `words`: how the recipe is called on the command line."""
    from pipeline.runtimes.tensorrt.executors.script import Handover, render, write_script

    path = store.reports / f"{plan.recipe.name}-build.sh"
    engines = [Handover(step.name, step.key.name, job) for step, job in handed.jobs]
    write_script(path, render(plan.recipe.name, words, engines))
    return path


def adopt_commands(plan: Plan, handed: HandedOver, words: str) -> list[str]:
    """What to run when the script's folders are here; they have the names that the script gives them."""
    from pipeline.runtimes.tensorrt.executors.script import folder_name

    folder = folder_name(plan.recipe.name)
    return [
        f"pipeline adopt {words} {step.name} {folder}/{step.name.partition('.')[2]}"
        for step, _ in handed.jobs
    ]


def check_adoptable(plan: Plan, name: str, folder: Path) -> ExecutorChoice:
    """Whether the folder holds the engine of the step; the choice that makes a build take it.

    Raises:
        UserError: it does not, or there is no such step.
    """
    from pipeline.runtimes.tensorrt.executors.elsewhere import check_folder

    steps = [step.name for step in plan if step.stage == _STAGE]
    runtime = plan.recipe.runtime
    if runtime.kind != "tensorrt":
        raise UserError(
            f"{plan.recipe.name} has runtime.kind = {runtime.kind}: only engines of tensorrt are adopted"
        )
    if name not in steps:
        raise UserError(f"no engine {name!r}; this recipe has {', '.join(steps)}")
    check_folder(folder, plan[name].key.name, runtime.version)
    return ExecutorChoice("adopt", folder=folder)
