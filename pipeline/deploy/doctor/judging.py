"""Which recipes are runnable here: by the rules of preflight, and by what builds and servers need besides.

A finding about the machine counts only for the ways that it is about: a driver for what runs on a GPU, `/dev/shm` of
the host only for processes of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.deploy.doctor import needs
from pipeline.deploy.doctor.report import Obstacle, Verdict, Way, WayName
from pipeline.errors import InvalidInput
from pipeline.machine.inventory import Inventory
from pipeline.machine.packages import Extra
from pipeline.planning.parallelism import parallelism
from pipeline.planning.plan import TARGET
from pipeline.planning.preflight import Finding, findings
from pipeline.recipe import Recipe

_MACHINE = "machine."  # begins the key of a finding about a machine
_ENGINE: tuple[WayName, ...] = ("build", "local", "docker")
_ABOUT: dict[str, tuple[WayName, ...]] = {  # key of a finding about a machine -> ways that it is about
    "machine.store": ("build",),
    "machine.memory": ("build",),
    "machine.docker": ("docker",),
    "machine.shm": ("local",),
    "machine.memlock": ("local",),
    "machine.mpi_slots": ("local",),
    "machine.software": ("local",),
}


@dataclass(frozen=True, slots=True)
class Found:
    """All that a recipe is held against."""

    machine: Inventory
    extras: tuple[Extra, ...]
    server_problem: str  # why the embedded Triton cannot run; empty if it can
    in_store: frozenset[str]  # repositories of the hub whose files the store has


def judge(name: str, recipe: Recipe, found: Found) -> Verdict:
    """Whether a recipe can be built and deployed here."""
    said = findings(recipe, machine=found.machine.facts())
    refusing = [finding for finding in said if finding.severity == "error"]
    names: tuple[WayName, ...] = (
        ("build", "local") if recipe.runtime.kind == "cpu" else ("build", "local", "docker")
    )
    ways = tuple(
        _way(one, [*_of_rules(one, recipe, refusing), *_of_needs(one, recipe, found)]) for one in names
    )
    built, *deployed = (way.possible for way in ways)
    runtime, file = recipe.runtime, recipe.provenance.file
    return Verdict(
        recipe=name,
        file=str(file) if file else None,
        runtime=runtime.kind,
        gpus=0 if runtime.kind == "cpu" else parallelism(recipe, TARGET).world,
        gpu=None if runtime.kind == "cpu" else runtime.gpu,
        runnable=built and any(deployed),
        ways=ways,
        warnings=tuple(_obstacle(finding) for finding in said if finding.severity == "warning"),
    )


def unreadable(name: str, error: InvalidInput) -> Verdict:
    """The verdict of a recipe that cannot be loaded: every fault stands in every way."""
    faults = tuple(Obstacle(fault.key or fault.where or "recipe", str(fault)) for fault in error.faults)
    return Verdict(name, None, None, 0, None, False, tuple(Way(way, False, faults) for way in _ENGINE))


def _way(name: WayName, obstacles: Iterable[Obstacle]) -> Way:
    unique = tuple(dict.fromkeys(obstacles))
    return Way(name, not unique, unique)


def _of_rules(way: WayName, recipe: Recipe, refusing: Iterable[Finding]) -> Iterator[Obstacle]:
    """The errors that are about a way; those about the recipe itself are about all."""
    for finding in refusing:
        key = finding.keys[0]
        if key.startswith(_MACHINE) and way not in _ABOUT.get(key, _runs_on_gpu(recipe)):
            continue
        yield _obstacle(finding)


def _runs_on_gpu(recipe: Recipe) -> tuple[WayName, ...]:
    """The ways that need the GPU: nothing is compiled for `pytorch`."""
    return _ENGINE if recipe.runtime.kind == "tensorrt" else ("local", "docker")


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
