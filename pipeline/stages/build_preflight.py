"""Whether fetched checkpoints suit their recipe, and this machine what it is to do, before anything long is done.

The sizes of well-known models are data, and a local checkpoint can be read at once; those are judged when a build is
prepared. Any other model of the hub is judged here, as soon as the store has it, and so are tokenizers: a draft's
against its target's. Of the machine count the disk of the store, and memory and GPUs for what is to be calibrated and
compiled on it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pipeline.machine.disks import read_disk
from pipeline.machine.hub import read_hub
from pipeline.machine.inventory import take
from pipeline.plan.machine_facts import DiskFacts, MachineFacts
from pipeline.plan.model_facts import ModelFacts, TokenizerFacts, facts_in, known_models
from pipeline.plan.plan import DRAFT, TARGET, Plan
from pipeline.plan.preflight import Finding, GeneratedConfig, allow, findings, machine_findings, refuse
from pipeline.plan.preflight.context import make_context
from pipeline.plan.preflight.needs import needs_of, to_build
from pipeline.recipe import LocalSource, Recipe
from pipeline.runtimes.base import ExecutorChoice
from pipeline.stages.fetch import HubCheckpoint, ResolvedSource
from pipeline.store import Store

_ELSEWHERE = ("print", "print-all", "adopt")  # executors for which another machine compiles
_LOOK_S = 60.0  # a driver that no process holds open takes long to answer


@dataclass(frozen=True, slots=True)
class Making:
    """What a build is about to do on this machine."""

    stages: frozenset[str]  # of the steps that the store lacks
    executor: ExecutorChoice  # who runs the builder of engines
    sources: Mapping[str, ResolvedSource]  # role -> checkpoint


def judge_fit(
    plan: Plan,
    store: Store,
    emitted: GeneratedConfig,
    allowed: frozenset[str],
    making: Making | None = None,
) -> tuple[Finding, ...]:
    """All findings about a planned build, with what the store has by now.

    Args:
        making: what is to be made now; None: nothing, and no machine is judged.

    Raises:
        InvalidInput: with everything that does not fit.
    """
    recipe, models = plan.recipe, _models(plan, store, making.sources if making is not None else {})
    found = findings(recipe, models, emitted=emitted)
    if making is not None:
        found += _of_machine(plan, store, models, making)
    return refuse(recipe, allow(found, allowed))


def _of_machine(
    plan: Plan, store: Store, models: Mapping[str, ModelFacts], making: Making
) -> tuple[Finding, ...]:
    """What this machine lacks for the steps that are to be made on it."""
    needs = needs_of(make_context(plan.recipe, models))
    build = shlex.join(("pipeline", "build", *plan.recipe.words, *store.words))
    wanted = to_build(
        replace(needs, build=build),
        compiles="build" in making.stages and making.executor.name not in _ELSEWHERE,
        calibrates="calibrate" in making.stages,
    )
    facts = replace(_machine(making.executor.devices), store=_room(plan, store))
    return machine_findings(wanted, facts)


@cache
def _machine(devices: tuple[int, ...]) -> MachineFacts:
    """Memory and GPUs of this machine, once a run. Where the driver cannot be asked, the builder itself will say so."""
    facts = take(only=("memory", "gpus"), deadline_s=_LOOK_S).facts(devices)
    return replace(facts, gpus=facts.gpus or None)


def _models(plan: Plan, store: Store, asked: Mapping[str, ResolvedSource]) -> dict[str, ModelFacts]:
    """What is known of the models offline, and of those that are here. `asked`: of these, the hub is asked."""
    known = known_models(plan.recipe)
    roles = (TARGET,) if plan.recipe.draft is None else (TARGET, DRAFT)
    for role in roles:
        folder = _folder(plan, store, role)
        if folder is None:
            known[role] = replace(known[role], access=_access(asked.get(role)))
            continue
        seen = facts_in(folder)
        facts = replace(seen, sizes=known[role].sizes or seen.sizes)
        # Only a draft's and its target's are compared, and to load one takes a while.
        known[role] = replace(facts, tokenizer=_tokenizer(folder)) if DRAFT in roles else facts
    return known


def _access(source: ResolvedSource | None) -> int | None:
    """HTTP status with which the hub answers for a checkpoint; None: it does not answer, or nobody asks."""
    if not isinstance(source, HubCheckpoint) or source.offline:
        return None
    return read_hub([(source.repo, source.commit)]).repositories.get(source.repo)


def _folder(plan: Plan, store: Store, role: str) -> Path | None:
    """Where the checkpoint is, if it is anywhere here."""
    artifact = store.find(plan[f"fetch.{role}"].key)
    if artifact is not None:
        return artifact.path
    source = _source(plan.recipe, role)
    return source.path if isinstance(source, LocalSource) else None


def _source(recipe: Recipe, role: str) -> object:
    checkpoint = recipe.draft if role == DRAFT else recipe.model
    return checkpoint.source if checkpoint is not None else None


@cache
def _tokenizer(folder: Path) -> TokenizerFacts | None:
    """Artifacts do not change, and a local checkpoint is read once a run."""
    return TokenizerFacts.read(folder)


def _room(plan: Plan, store: Store) -> DiskFacts | None:
    """The disk of the store, and what of the plan lies there already."""
    held = sum(
        artifact.manifest.total_bytes for step in plan if (artifact := store.find(step.key)) is not None
    )
    disk = read_disk(store.root)
    return None if disk.problem else DiskFacts(disk.folder, disk.device, disk.free_bytes, held)
