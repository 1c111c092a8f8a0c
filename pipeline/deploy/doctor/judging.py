"""Which recipes are runnable here: by the rules of preflight, and by what builds and servers need besides.

A finding about the machine counts only for the ways that it is about: a driver for what runs on a GPU, `/dev/shm` of
the host only for processes of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.contracts.rules import rules
from pipeline.deploy.doctor import needs
from pipeline.deploy.doctor.report import Obstacle, Verdict, Way, WayName
from pipeline.errors import InvalidInput
from pipeline.machine.inventory import Inventory
from pipeline.machine.packages import Extra
from pipeline.planning.machine_facts import MachineFacts
from pipeline.planning.model_facts import known_models
from pipeline.planning.parallelism import parallelism
from pipeline.planning.plan import TARGET
from pipeline.planning.preflight import Finding, findings
from pipeline.planning.preflight.judging import machine_findings
from pipeline.planning.preflight.needs import needs_of
from pipeline.planning.preflight.subject import subject
from pipeline.recipe import Recipe

_ALL: tuple[WayName, ...] = ("build", "local", "docker")
_SERVING: tuple[WayName, ...] = ("local", "docker")
_ABOUT: dict[str, tuple[WayName, ...]] = {  # rule -> the ways that it is about; of all others, all
    "host.disk": ("build",),
    "host.memory": _SERVING,  # an error is about the KV cache alone
    "host.shm": ("local",),  # containers are given their own
    "host.memlock": ("local",),
    "port.version": ("local",),
    "source.gated": ("build",),
    "source.missing": ("build",),
    "host.container": ("local",),
}
_OF_GPUS = frozenset(one.id for one in rules() if one.group == "devices")


@dataclass(frozen=True, slots=True)
class Found:
    """All that a recipe is held against."""

    machine: Inventory
    extras: tuple[Extra, ...]
    server_problem: str  # why the embedded Triton cannot run; empty if it can
    in_store: Mapping[str, int]  # repository of the hub whose files the store has -> their bytes

    def facts(self, recipe: Recipe) -> MachineFacts:
        """As rules see the machine for one recipe: what the store has of it needs no room and no hub."""
        facts, here = self.machine.facts(), self.in_store
        held = sum(here.get(repo, 0) for repo in needs.hub_repositories(recipe))
        store = replace(facts.store, held_bytes=held) if facts.store is not None else None
        hub = {repo: status for repo, status in facts.hub.items() if repo not in here}
        return replace(facts, store=store, hub=hub)


def judge(name: str, recipe: Recipe, found: Found) -> Verdict:
    """Whether a recipe can be built and deployed here."""
    said = findings(recipe, machine=found.facts(recipe))
    refusing = [finding for finding in (*said, *_installed(recipe, found)) if finding.severity == "error"]
    names: tuple[WayName, ...] = ("build", "local") if recipe.runtime.kind == "cpu" else _ALL
    ways = []
    for way in names:
        of_rules = (_obstacle(one) for one in refusing if way in _about(one.rule, recipe))
        ways.append(_way(way, (*of_rules, *_of_needs(way, recipe, found))))
    built, *deployed = (way.possible for way in ways)
    runtime, file = recipe.runtime, recipe.provenance.file
    return Verdict(
        recipe=name,
        file=str(file) if file else None,
        runtime=runtime.kind,
        gpus=0 if runtime.kind == "cpu" else parallelism(recipe, TARGET).world,
        gpu=None if runtime.kind == "cpu" else runtime.gpu,
        runnable=built and any(deployed),
        ways=tuple(ways),
        warnings=tuple(_obstacle(finding) for finding in said if finding.severity == "warning"),
    )


def unreadable(name: str, error: InvalidInput) -> Verdict:
    """The verdict of a recipe that cannot be loaded: every fault stands in every way."""
    faults = tuple(Obstacle(fault.key or fault.where or "recipe", str(fault)) for fault in error.faults)
    return Verdict(name, None, None, 0, None, False, tuple(Way(way, False, faults) for way in _ALL))


def _way(name: WayName, obstacles: Iterable[Obstacle]) -> Way:
    unique = tuple(dict.fromkeys(obstacles))
    return Way(name, not unique, unique)


def _installed(recipe: Recipe, found: Found) -> tuple[Finding, ...]:
    """What is installed here, judged as if it had to serve at once."""
    software = found.machine.software
    if software is None:
        return ()
    wanted = replace(needs_of(subject(recipe, known_models(recipe))), where="local")
    return machine_findings(wanted, MachineFacts(software=software.facts()))


def _about(rule: str, recipe: Recipe) -> tuple[WayName, ...]:
    """The ways that a rule is about. Engines are built on the GPU that serves; for `pytorch` nothing is compiled."""
    if rule in _OF_GPUS and recipe.runtime.kind != "tensorrt":
        return _SERVING
    return _ABOUT.get(rule, _ALL)


def _of_needs(way: WayName, recipe: Recipe, found: Found) -> Iterator[Obstacle]:
    match way, recipe.runtime.kind:
        case "build", _:
            yield from needs.packages(needs.extras_to_build(recipe), found.extras)
            yield from needs.hub(recipe, found.machine, found.in_store)
            yield from needs.engine_builder(recipe, found.machine)
        case "local", "cpu":
            yield from needs.packages(("", "server"), found.extras)
            if found.server_problem:
                yield Obstacle("Triton", found.server_problem)
        case "local", _:
            yield from needs.native_server(recipe, found.machine)
        case "docker", _:
            yield from needs.container(found.machine)


def _obstacle(finding: Finding) -> Obstacle:
    return Obstacle(finding.keys[0], finding.problem, finding.fix, finding.rule)
