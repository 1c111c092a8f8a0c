"""Executes a plan: takes what the store has, makes what it lacks, and stops at the gate.

Steps are demanded from the last one back, so a finished package needs none of its inputs, and a killed build goes on
where it was.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.plan.plan import Plan, Step
from pipeline.progress import Progress
from pipeline.runtimes.base import BuiltElsewhere
from pipeline.stages.gate import hold_to_gate
from pipeline.stages.stage_registry import MAKERS, Work
from pipeline.store import Artifact, Json, Store

if TYPE_CHECKING:
    from pipeline.runtimes.tensorrt.executors.job import BuildJob


class HandedOver(Exception):
    """A build stopped where another machine goes on. Not a failure."""

    def __init__(self, jobs: Sequence[tuple[Step, BuildJob]]) -> None:
        self.jobs = tuple(jobs)
        super().__init__(", ".join(step.name for step, _ in self.jobs))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one step."""

    step: Step
    artifact: Artifact
    made: bool  # False: it was in the store
    seconds: float


@dataclass(slots=True)
class Builder:
    """One run over one plan."""

    plan: Plan
    store: Store
    work: Callable[[Step, Mapping[str, Path], Path], Work]
    progress: Progress
    on_outcome: Callable[[Outcome], None] = lambda _: None
    _have: dict[str, Artifact] = field(default_factory=dict)

    def run(self, until: str = "package") -> Artifact:
        """The artifact of step `until`, made if need be.

        Raises:
            GateFailed: the calibrated model is over the recipe's budget; nothing after `evaluate` was made.
            HandedOver: engines are to be built on another machine; all before them is made.
            DamagedArtifact: what the store has is not what was published.
            UserError: there is no such step.
        """
        if until == "package" and "evaluate" in self.plan:
            self._realize("evaluate")  # a package from the store is held to today's budgets, too
        return self._realize(until)

    def finished(self) -> Artifact:
        """The package, if the store has it.

        Raises:
            UserError: it is not built. GateFailed: its figures are over today's budgets.
        """
        package = self.store.find(self.plan["package"].key)
        if package is None or not self.store.use(package):
            recipe = self.plan.recipe
            build = shlex.join(("pipeline", "build", *recipe.words, *self.store.words))
            raise UserError(
                f"{recipe.name} is not built as its recipe says now; run {build}, or serve --build"
            )
        evaluation = self.plan["evaluate"].key if "evaluate" in self.plan else None
        if evaluation is not None and (found := self.store.find(evaluation)) is not None:
            hold_to_gate(self.plan.recipe, found, self.store, self.progress)
        return package

    def _realize(self, name: str) -> Artifact:
        if name not in self._have:
            step = self.plan[name]
            found = self.store.find(step.key)
            if found is not None and self.store.use(found):
                self.store.check(found, self.progress)
                self._have[name] = found
                self.on_outcome(Outcome(step, found, made=False, seconds=0.0))
            else:
                self._have[name] = self._make(step)
            if step.stage == "evaluate":
                hold_to_gate(self.plan.recipe, self._have[name], self.store, self.progress)
        return self._have[name]

    def _inputs(self, step: Step) -> dict[str, Path]:
        """Each input's folder. All are made, even if one of them waits for another machine."""
        paths: dict[str, Path] = {}
        jobs: list[tuple[Step, BuildJob]] = []
        for role, source in step.inputs.items():
            try:
                paths[role] = self._realize(source).path
            except HandedOver as handed:
                jobs += handed.jobs
        if jobs:
            raise HandedOver(jobs)
        return paths

    def _make(self, step: Step) -> Artifact:
        inputs = self._inputs(step)
        self.progress.say(f"{step.name}: {_purpose(step)}")
        start = time.monotonic()

        def make(into: Path) -> Mapping[str, Json]:
            return MAKERS[step.stage](self.work(step, inputs, into))

        try:
            artifact = self.store.obtain(step.key, make, recipe=self.plan.recipe.name, progress=self.progress)
        except BuiltElsewhere as elsewhere:
            raise HandedOver([(step, elsewhere.job)]) from None
        self.on_outcome(Outcome(step, artifact, made=True, seconds=time.monotonic() - start))
        return artifact


def demanded(
    plan: Plan, store: Store, until: str = "package"
) -> Iterator[tuple[Step, Artifact | None, bool]]:
    """Each step of the plan, its artifact if the store has it, and whether a build would have to make it."""
    wanted: set[str] = set()

    def demand(name: str) -> None:
        if name not in wanted and store.find(plan[name].key) is None:
            wanted.add(name)
            for source in plan[name].inputs.values():
                demand(source)

    demand(until)
    for step in plan:
        yield step, store.find(step.key), step.name in wanted


_PURPOSES = {
    "fetch": "checkpoint files from {source}",
    "dataset": "{samples} calibration samples and the held-out text, frozen to files",
    "calibrate": "{format} scales with ModelOpt, and the two exports",
    "convert": "TensorRT-LLM checkpoint, tensor parallel {tensor}, pipeline parallel {pipeline}",
    "evaluate": "{judged} against the original on held-out text",
    "build": "engine for the {runtime} runtime",
    "package": "Triton model repository",
}


def _purpose(step: Step) -> str:
    settings = step.key.settings
    judged: Any = settings.get("judged", [])
    values = {
        **settings,
        "source": settings.get("source", ""),
        "runtime": settings.get("runtime", ""),
        "judged": " and ".join(one["folder"] for one in judged),
    }
    return _PURPOSES[step.stage].format_map(values)
