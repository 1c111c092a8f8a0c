"""From a recipe to the plan of its build, checked: facts first, then functions that compute.

    prepared = prepare(recipe, store)            # facts, preflight, plan
    prepared.check(store)                        # can this machine make what the store lacks?
    Builder(prepared, store, progress).run()     # `pipeline.stages`

All I/O is in `pipeline.prepare.facts`; plan, rules and findings are those of `pipeline.plan`. Nothing is made here.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.contracts.rules import rules
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.machine.packages import Need, missing_text, wrong_python
from pipeline.plan.plan import Plan, Step, make_plan
from pipeline.plan.preflight import (
    Finding,
    GeneratedConfig,
    allow,
    finding_lines,
    findings,
    machine_findings,
    refuse,
)
from pipeline.plan.preflight.context import make_context
from pipeline.plan.preflight.needs import needs_of, needs_to_build
from pipeline.prepare.facts import (
    RecipeFacts,
    read_access,
    read_machine,
    read_models,
    read_plan_facts,
    read_recipe_facts,
    resolve_sources,
    with_folder_problems,
)
from pipeline.progress import Progress, Silent
from pipeline.recipe import HubSource, NamedDataset, Recipe, load_recipe
from pipeline.recipe.loading import located
from pipeline.recipe.repaired import load_repaired
from pipeline.recipe.validators import Problem
from pipeline.runtimes import AUTO, ExecutorChoice
from pipeline.sources import HubCheckpoint, ResolvedSource
from pipeline.sources.dataset import read_definition
from pipeline.store import Artifact, Store

# Executors for which another machine compiles engines.
_ELSEWHERE = ("print", "print-all", "adopt")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plan of a build, and what its stages need besides it."""

    plan: Plan
    sources: Mapping[str, ResolvedSource]  # role -> checkpoint
    findings: tuple[Finding, ...]  # of preflight; none of them stops the build
    emitted: GeneratedConfig  # what the runtime will write
    allowed: frozenset[str]  # ids of rules whose errors are let pass

    @property
    def recipe(self) -> Recipe:
        """The recipe of the plan."""
        return self.plan.recipe

    def check(
        self,
        store: Store,
        executor: ExecutorChoice = AUTO,
        until: str = "package",
        afterwards: Iterable[Need] = (),
    ) -> None:
        """Check that this machine can make all that the store lacks, before any of it is made.

        Args:
            afterwards: Further needs, of what runs when all is made.

        Raises:
            UserError: Distributions are missing, or nothing here builds engines; all of it in one text.
            InvalidInput: The machine lacks room, memory or GPUs.
        """
        steps = [step for step, _, needed in step_states(self.plan, store, until) if needed]
        recipe = self.recipe
        needs = [need for step in steps for need in needs_of_stage(recipe, *step.name.split(".", 1))]
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
        self.check_fit(store, executor, until)

    def check_fit(
        self, store: Store, executor: ExecutorChoice = AUTO, until: str = "package"
    ) -> tuple[Finding, ...]:
        """Hold the build against this machine and the checkpoints that the store has by now.

        The sizes of well-known models are data, and local checkpoints can be read at once. Any other model of the Hub
        is judged here, as soon as the store has it, and so are a draft's and its target's tokenizers. Of the machine
        count the disk of the store, and memory and GPUs for what is to be calibrated and compiled on it.

        Args:
            until: Name of the last step that is wanted.

        Returns:
            All findings, none of which stops the build.

        Raises:
            InvalidInput: With everything that does not fit.
        """
        recipe, models = self.recipe, read_models(self.plan, store)
        stages = {step.stage for step, _, needed in step_states(self.plan, store, until) if needed}
        needs = needs_to_build(
            replace(
                needs_of(make_context(recipe, models)),
                build=shlex.join(("pipeline", "build", *recipe.argv, *store.argv)),
            ),
            compiles="build" in stages and executor.name not in _ELSEWHERE,
            calibrates="calibrate" in stages,
        )
        machine = read_machine(self.plan, store, executor.devices)
        offline = any(
            isinstance(source, HubCheckpoint) and source.offline for source in self.sources.values()
        )
        access = None if offline else read_access(recipe, store)
        all_findings = (*findings(recipe, models, access, self.emitted), *machine_findings(needs, machine))
        return refuse(recipe, allow(all_findings, self.allowed))


def prepare(
    recipe: Recipe,
    store: Store,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
) -> Prepared:
    """Check a recipe, resolve what it names, and plan its build.

    Args:
        store: Has the checkpoints that were fetched, and remembers the hashes of local ones.
        allowed: Ids of rules whose errors are let pass, as `preflight.allowance` returns them.

    Raises:
        InvalidInput: The recipe asks for something that does not exist, or does not fit.
        SourceError: A checkpoint cannot be had.
    """
    facts = read_recipe_facts(recipe)
    refuse(recipe, allow(with_folder_problems(facts).findings(), allowed))
    prepared = plan_build(facts, store, offline=offline, progress=progress, allowed=allowed)
    for line in finding_lines(prepared.findings):
        (progress or Silent()).say(line)
    return prepared


def plan_build(
    facts: RecipeFacts,
    store: Store,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
) -> Prepared:
    """Resolve what a recipe names that preflight does not refuse, plan its build, and judge the checkpoints here.

    Raises:
        InvalidInput: A checkpoint that is here does not fit the recipe.
        SourceError: A checkpoint cannot be had.
    """
    recipe, emitted = facts.recipe, facts.emitted
    sources = resolve_sources(recipe, store, offline=offline, progress=progress)
    plan = make_plan(recipe, read_plan_facts(recipe, sources, emitted))
    remaining = refuse(recipe, allow(findings(recipe, read_models(plan, store), emitted=emitted), allowed))
    return Prepared(plan, sources, remaining, emitted, allowed)


def check_recipe_file(path_or_name: str, overrides: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Load a recipe and judge it without download and store; return the warnings and notes of `recipes validate`.

    Raises:
        InvalidInput: With all faults of the file, and all findings that are about none of them.
    """
    try:
        recipe = load_recipe(path_or_name, overrides)
    except InvalidInput as error:
        behind = [
            fault if fault.where == "--set" else replace(fault, where=error.subject)
            for fault in _behind(path_or_name, overrides)
        ]
        faults = sorted((*error.faults, *behind), key=lambda fault: (fault.where == "--set", fault.line or 0))
        raise InvalidInput(error.subject, faults, error.more) from None
    return check_recipe(recipe)


def _behind(path_or_name: str, overrides: Sequence[str]) -> list[Fault]:
    """Findings that would refuse a recipe once its faults are mended."""
    repaired = load_repaired(path_or_name, overrides)
    if repaired is None:
        return []
    recipe, replaced = repaired
    stopping = [
        finding
        for finding in with_folder_problems(read_recipe_facts(recipe)).findings()
        if finding.stops and not _concerns(finding, replaced)
    ]
    return located(
        recipe, [Problem(finding.keys, finding.problem, finding.fix, finding.rule) for finding in stopping]
    )


def _concerns(finding: Finding, replaced: Collection[str]) -> bool:
    """Whether a finding may be about values that were replaced."""
    rule = next(known for known in rules() if known.id == finding.rule)
    read = {*finding.keys, *rule.fields}
    if rule.group != "sourcing":
        # Which release and which runtime decide on all rules; sums of memory and tokens have many terms.
        read |= {"runtime.kind", "runtime.version"}
    if rule.group in ("budgets", "memory"):
        read |= {"limits", "kv_cache", "draft", "quantization", "runtime"}
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for key in read
        for other in replaced
    )


def check_recipe(recipe: Recipe) -> tuple[Finding, ...]:
    """Judge a recipe without download and store; return warnings and notes.

    Raises:
        InvalidInput: With all findings that stop it.
    """
    return refuse(recipe, with_folder_problems(read_recipe_facts(recipe)).findings())


def step_states(
    plan: Plan, store: Store, until: str = "package"
) -> Iterator[tuple[Step, Artifact | None, bool]]:
    """Yield each step of a plan, its artifact if the store has it, and whether a build would have to make it.

    Args:
        until: Name of the last step that is wanted.
    """
    wanted: set[str] = set()

    def demand(name: str) -> None:
        if name not in wanted and store.find(plan[name].key) is None:
            wanted.add(name)
            for source in plan[name].inputs.values():
                demand(source)

    demand(until)
    for step in plan:
        yield step, store.find(step.key), step.name in wanted


def needs_of_stage(recipe: Recipe, stage: str, role: str = "") -> Iterator[Need]:
    """Distributions that making one artifact of a recipe imports; none for a stage that the recipe does without.

    Args:
        stage: fetch, dataset, sensitivity, calibrate, convert, evaluate, build or package.
        role: target, draft or adapter.NAME; "" stands for all.
    """
    step = f"{stage}.{role}" if role else stage
    sources = [checkpoint.source for name, checkpoint in recipe.sources.items() if role in ("", name)]
    calibrated = recipe.quantization.format != "none"
    match stage:
        case "fetch" if any(isinstance(source, HubSource) for source in sources):
            yield Need("hub", step)
        case "dataset" if calibrated or _calibrates_draft(recipe):
            yield from _needs_of_dataset(recipe, step)
        case "sensitivity" if recipe.quantization.format == "auto":
            yield Need("calibrate", step)
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
        if definition.splits.train.endswith(".parquet"):
            packages.add("pyarrow")
    yield Need("calibrate", step, frozenset(packages))


def _calibrates_draft(recipe: Recipe) -> bool:
    return recipe.draft is not None and recipe.draft.quantization != "none"
