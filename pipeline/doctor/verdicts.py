"""Which recipes are runnable here: by the rules of preflight, and by what builds and servers need besides.

The rules are asked for each way apart, because each needs something else: a build one GPU of the right kind and room,
a server of this machine what is installed on it, a container a Docker that has GPUs to give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.contracts.rules import rule
from pipeline.doctor.report import Obstacle, Verdict, Way, WayName
from pipeline.errors import InvalidInput
from pipeline.machine.inventory import Inventory
from pipeline.machine.packages import Extra
from pipeline.plan.machine_facts import MachineFacts, SoftwareFacts
from pipeline.plan.model_facts import offline_facts
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import REVISIONS, TARGET
from pipeline.plan.preflight import Finding, findings
from pipeline.plan.preflight.context import make_context
from pipeline.plan.preflight.needs import needs_of, needs_to_build, needs_to_serve
from pipeline.plan.preflight.run_rules import machine_findings
from pipeline.prepare.facts import hub_files
from pipeline.prepare.prepare import needs_of_stage
from pipeline.recipe import Recipe, TensorRTRuntime

_ALL: tuple[WayName, ...] = ("build", "local", "docker")
_REFUSED = 400  # HTTP statuses from here on


@dataclass(frozen=True, slots=True)
class DoctorFacts:
    """All that a recipe is held against."""

    machine: Inventory
    extras: tuple[Extra, ...]
    server_problem: str  # why the embedded Triton cannot run; empty if it can
    in_store: Mapping[str, int]  # repository of the hub whose files the store has -> their bytes

    def facts(self, recipe: Recipe, way: WayName) -> MachineFacts:
        """As rules see the machine: what the store has of a recipe needs no room, and no hub."""
        facts, in_store = self.machine.facts(), self.in_store
        held_bytes = sum(in_store.get(repo, 0) for repo, _, _ in hub_files(recipe))
        store = replace(facts.store, held_bytes=held_bytes) if facts.store is not None else None
        hub = {repo: status for repo, status in facts.hub.items() if repo not in in_store}
        return replace(
            facts,
            store=store,
            hub=hub,
            software=self._software() if way == "local" else None,
            docker=facts.docker if way == "docker" else None,
            memlock_limited=facts.memlock_limited if way == "local" else None,
        )

    def _software(self) -> SoftwareFacts | None:
        """Installed software, and the programs of a launch that are there."""
        machine = self.machine
        if machine.software is None or machine.triton is None:
            return None
        mpirun = {"mpirun"} if machine.mpi is not None and not machine.mpi.problem else set[str]()
        server = {machine.triton.path} if machine.triton.path is not None else set[str]()
        return replace(machine.software.facts(), programs=frozenset(mpirun | server))


def judge(name: str, recipe: Recipe, of_recipe: tuple[Finding, ...], facts: DoctorFacts) -> Verdict:
    """Whether a recipe can be built and deployed here. `of_recipe`: what is to be said of it on any machine."""
    names: tuple[WayName, ...] = ("build", "local") if recipe.runtime.kind == "cpu" else _ALL
    way_findings = {way: (*of_recipe, *_findings(way, recipe, facts)) for way in names}
    ways = tuple(_way(way, way_findings[way], _of_needs(way, recipe, facts)) for way in names)
    built, *deployed = (way.possible for way in ways)
    runtime, file = recipe.runtime, recipe.provenance.file
    warnings = (
        _obstacle(finding) for way in names for finding in way_findings[way] if finding.severity == "warning"
    )
    return Verdict(
        recipe=name,
        file=str(file) if file else None,
        runtime=runtime.kind,
        gpus=0 if runtime.kind == "cpu" else parallelism(recipe, TARGET).world,
        gpu=None if runtime.kind == "cpu" else runtime.gpu,
        runnable=built and any(deployed),
        ways=ways,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _findings(way: WayName, recipe: Recipe, found: DoctorFacts) -> Iterator[Finding]:
    """Findings of preflight about this machine."""
    machine, wanted = found.facts(recipe, way), needs_of(make_context(recipe, offline_facts(recipe)))
    if way == "build":
        if any(status >= _REFUSED for status in machine.hub.values()):
            build_findings = findings(recipe, machine=MachineFacts(hub=machine.hub))
            yield from (need for need in build_findings if rule(need.rule).group == "sourcing")
        yield from machine_findings(needs_to_build(wanted), machine)
    else:
        yield from machine_findings(needs_to_serve(wanted, way), machine)


def unreadable(name: str, error: InvalidInput) -> Verdict:
    """The verdict of a recipe that cannot be loaded: every fault stands in every way."""
    faults = tuple(Obstacle(fault.key or fault.where or "recipe", str(fault)) for fault in error.faults)
    return Verdict(name, None, None, 0, None, False, tuple(Way(way, False, faults) for way in _ALL))


def _way(name: WayName, findings: Iterable[Finding], lacking: Iterable[Obstacle]) -> Way:
    refusing = (_obstacle(finding) for finding in findings if finding.severity == "error")
    unique = tuple(dict.fromkeys((*refusing, *lacking)))
    return Way(name, not unique, unique)


def _of_needs(way: WayName, recipe: Recipe, facts: DoctorFacts) -> Iterator[Obstacle]:
    match way, recipe.runtime.kind:
        case "build", _:
            yield from package_obstacles(extras_to_build(recipe), facts.extras)
            yield from hub_obstacles(recipe, facts.machine, facts.in_store)
            yield from builder_obstacles(recipe, facts.machine)
        case "local", "cpu":
            yield from package_obstacles(("", "server"), facts.extras)
            if facts.server_problem:
                yield Obstacle("Triton", facts.server_problem)


def _obstacle(finding: Finding) -> Obstacle:
    return Obstacle(finding.keys[0], finding.problem, finding.fix, finding.rule)


def extras_to_build(recipe: Recipe) -> tuple[str, ...]:
    """The extras that a build imports; "" is what every part needs."""
    needed = (need.extra for stage in REVISIONS for need in needs_of_stage(recipe, stage))
    return tuple(dict.fromkeys(("", *needed)))


def package_obstacles(names: Sequence[str], extras: Sequence[Extra]) -> Iterator[Obstacle]:
    """Distributions of some extras that are not installed."""
    for extra in extras:
        if extra.name in names and extra.lacking:
            lacking = ", ".join(
                f"{package.name}{package.wanted} is missing" if package.installed is None
                else f"{package.name} is {package.installed}, wanted is {package.wanted}"
                for package in extra.lacking
            )  # fmt: skip
            yield Obstacle("packages", lacking, extra.install)


def hub_obstacles(recipe: Recipe, inventory: Inventory, in_store: Mapping[str, int]) -> Iterator[Obstacle]:
    """Models that would have to be downloaded, and cannot be. `in_store`: repositories that are there already."""
    if inventory.hub is None or all(repo in in_store for repo, _, _ in hub_files(recipe)):
        return
    if inventory.hub.offline:
        yield Obstacle("hub", "HF_HUB_OFFLINE is set, and the store lacks the model", "unset HF_HUB_OFFLINE")
    elif inventory.hub.problem:
        fix = "set HF_ENDPOINT to a mirror that this machine reaches, or HTTPS_PROXY"
        yield Obstacle("hub", f"{inventory.hub.problem}; the store lacks the model", fix)


def builder_obstacles(recipe: Recipe, inventory: Inventory) -> Iterator[Obstacle]:
    """Who would run trtllm-build: this machine, or a container on it."""
    runtime = recipe.runtime
    if not isinstance(runtime, TensorRTRuntime):
        return
    native = _native_builder(runtime.version, inventory)
    docker = inventory.docker.problem if inventory.docker is not None else ""
    if native and docker:
        fix = "start Docker, or pipeline build RECIPE --executor print for a machine that can"
        yield Obstacle("trtllm-build", f"{native}; {docker}", fix)


def _native_builder(version: str, inventory: Inventory) -> str:
    """Why trtllm-build does not run here; empty if it does."""
    if inventory.builder is None:
        return ""
    if inventory.builder.path is None:
        return "there is no trtllm-build on PATH"
    if inventory.builder.version not in (None, version):
        return f"trtllm-build is of TensorRT-LLM {inventory.builder.version}, the recipe wants {version}"
    return ""
