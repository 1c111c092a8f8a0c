"""Compares what a recipe could be: its models are seen as `pipeline plan` sees them; preflight judges each option."""

from __future__ import annotations

from pipeline.errors import UserError
from pipeline.plan.model_facts import ModelFacts, checkpoints_of
from pipeline.plan.performance.compare import Comparison, compare
from pipeline.plan.performance.workload import WorkloadOptions
from pipeline.plan.preflight import findings
from pipeline.recipe import CpuRuntime, Recipe
from pipeline.stages.model_probe import see_models
from pipeline.stages.recipe_check import emission
from pipeline.store import Store


def compare_recipe(
    recipe: Recipe, store: Store, asked: WorkloadOptions, *, offline: bool = False
) -> Comparison:
    """Of a recipe for GPUs.

    Raises:
        UserError: it is for `cpu`, or the sizes of its models are not known and may not be asked for.
    """
    if isinstance(recipe.runtime, CpuRuntime):
        raise UserError("--compare is for recipes with runtime.kind tensorrt or pytorch; this one is for cpu")
    models = see_models(recipe, store, offline=offline)
    sizes = {role: model.sizes for role, model in models.items() if model.sizes is not None}
    for role in checkpoints_of(recipe):
        if role not in models:
            raise UserError(f"the sizes of the {role} are not among those that we know; leave out --offline")
        if role not in sizes:
            raise UserError(f"the {role} is a {models[role].architecture}, whose sizes cannot be read")
    facts = {role: ModelFacts(one) for role, one in sizes.items()}

    def judge(changed: Recipe) -> tuple[str, ...]:
        found = findings(changed, facts, emitted=emission(changed))
        return tuple(f"{one.problem} [{one.rule}]" for one in found if one.stops)

    question = asked.question(recipe.limits)
    return compare(recipe, sizes, question, steps=emission(recipe).steps, judge=judge)
