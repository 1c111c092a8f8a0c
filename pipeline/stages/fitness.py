"""Whether fetched checkpoints suit their recipe, and whether there is room, before anything long is done.

The sizes of well-known models are data, and a local checkpoint can be read at once; those are judged when a build is
prepared. Any other model of the hub is judged here, as soon as the store has it, and so are tokenizers: a draft's
against its target's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from pipeline.machine.disks import Disk, read_disk
from pipeline.planning.machine_facts import DiskFacts, MachineFacts
from pipeline.planning.model_facts import ModelFacts, known_models, sizes_in
from pipeline.planning.plan import DRAFT, TARGET, Plan
from pipeline.planning.preflight import Emission, Finding, allow, findings, refuse
from pipeline.planning.tokenizer_facts import TokenizerFacts
from pipeline.recipe import LocalSource, Recipe
from pipeline.store import Store


def judge_fit(
    plan: Plan, store: Store, emitted: Emission, allowed: frozenset[str], *, builds: bool
) -> tuple[Finding, ...]:
    """All findings about a planned build, with what the store has by now. `builds`: whether this machine makes it.

    Raises:
        InvalidInput: with everything that does not fit.
    """
    recipe = plan.recipe
    found = findings(recipe, _models(plan, store), _room(plan, store) if builds else None, emitted)
    return refuse(recipe, allow(found, allowed))


def _models(plan: Plan, store: Store) -> dict[str, ModelFacts]:
    """What is known of the models offline, and of those that are here."""
    known = known_models(plan.recipe)
    roles = (TARGET,) if plan.recipe.draft is None else (TARGET, DRAFT)
    for role in roles:
        folder = _folder(plan, store, role)
        if folder is None:
            continue
        facts = known.get(role) or ModelFacts(sizes_in(folder))
        # Only a draft's and its target's are compared, and to load one takes a while.
        known[role] = replace(facts, tokenizer=_tokenizer(folder)) if DRAFT in roles else facts
    return known


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


def _room(plan: Plan, store: Store) -> MachineFacts:
    """Disks of this machine: all that a build needs of it, whoever runs the builders of engines."""
    held = sum(
        artifact.manifest.total_bytes for step in plan if (artifact := store.find(step.key)) is not None
    )
    return MachineFacts(store=_facts(read_disk(store.root), held))


def _facts(disk: Disk, held: int) -> DiskFacts | None:
    return None if disk.problem else DiskFacts(disk.folder, disk.device, disk.free_bytes, held)
