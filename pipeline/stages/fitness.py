"""Whether fetched checkpoints suit their recipe, before anything long is done with them.

The sizes of well-known models are data, and a local checkpoint can be read at once; those are judged when a build is
prepared. Any other model of the hub is judged here, as soon as the store has it.
"""

from __future__ import annotations

from pipeline.planning.model_facts import ModelFacts, known_models, sizes_in
from pipeline.planning.plan import DRAFT, TARGET, Plan
from pipeline.planning.preflight import findings, refuse
from pipeline.store import Store


def refuse_unfit(plan: Plan, store: Store) -> None:
    """Hold the recipe against the sizes of the checkpoints that the store has and that were not known before.

    Raises:
        InvalidInput: with everything that does not fit.
    """
    known = known_models(plan.recipe)
    found = dict(known)
    for role in (TARGET, DRAFT):
        step = f"fetch.{role}"
        artifact = store.find(plan[step].key) if role not in known and step in plan else None
        sizes = sizes_in(artifact.path) if artifact is not None else None
        if sizes is not None:
            found[role] = ModelFacts(sizes)
    if found.keys() != known.keys():
        refuse(plan.recipe, findings(plan.recipe, found))
