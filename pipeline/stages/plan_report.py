"""Gathers what `pipeline plan` prints: sightings of the models, the plan, preflight, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.errors import InvalidInput, SourceError, UserError
from pipeline.machine.host import read_memory
from pipeline.machine.hub import read_hub
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.memory import (
    Alternative,
    MemoryPlan,
    ModelSpec,
    alternatives,
    deployment_spec,
    plan_memory,
)
from pipeline.plan.memory.footprint import weight_bytes
from pipeline.plan.memory.tensors import parameters
from pipeline.plan.model_facts import known_models
from pipeline.plan.performance import Forecast, WorkloadOptions, forecast_recipe
from pipeline.plan.plan import DRAFT, Plan
from pipeline.plan.preflight import Finding, GeneratedConfig, allow, findings
from pipeline.plan.report import Outlook
from pipeline.progress import Progress
from pipeline.recipe import CpuRuntime, HubSource, Recipe, load_recipe
from pipeline.recipe.provenance import Provenance
from pipeline.stages.fetch.resolving import is_offline
from pipeline.stages.model_probe import Sighting, in_store, see_models
from pipeline.stages.prepare import prepare
from pipeline.stages.recipe_check import emission
from pipeline.store import Store, human_bytes

_HUB_S = 3.0  # for an answer about access; a hub that is slower is taken to give it
_MOST = 1.03  # of what the files of a checkpoint hold, that may be counted


def look_ahead(
    recipe: Recipe,
    store: Store,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
    asked: WorkloadOptions | None = None,
) -> Outlook:
    """Everything that can be said of a recipe. Where a hub does not answer, what it would say is left out.

    Args:
        asked: about speed and cost, beyond the recipe.

    Raises:
        InvalidInput: a config.json that is here, or that the hub gives, cannot be read.
    """
    unknown: dict[str, str] = {}
    offline = offline or is_offline()
    models = _sightings(recipe, store, offline, progress, unknown)
    emitted = emission(recipe)
    facts = known_models(recipe)
    for role, one in models.items():
        facts[role] = replace(
            facts[role], sizes=one.sizes, architecture=one.architecture, weight_bytes=_bytes(one)
        )
    found = allow(findings(recipe, facts, _hub(recipe, store, offline), emitted), allowed)
    memory = _memory(recipe, models, emitted, unknown)
    plan, found = _plan(recipe, store, offline, allowed, found, unknown)
    return Outlook(
        recipe=recipe,
        findings=found,
        plan=plan,
        memory=memory,
        alternatives=_alternatives(recipe, memory) if memory is not None else (),
        performance=_performance(recipe, memory, asked or WorkloadOptions(), unknown)
        if memory is not None
        else None,
        seen={role: _described(one) for role, one in models.items()},
        doubts=_doubts(recipe, models) if memory is not None else (),
        unknown=unknown,
    )


def _hub(recipe: Recipe, store: Store, offline: bool) -> MachineFacts | None:
    """How the hub answers for checkpoints that the store lacks; None: nobody asks."""
    checkpoints = (recipe.model, *((recipe.draft,) if recipe.draft is not None else ()))
    asked = [
        (one.source.repo, one.revision)
        for one in checkpoints
        if isinstance(one.source, HubSource) and in_store(one.source, one.revision, store) is None
    ]
    if offline or not asked:
        return None
    return MachineFacts(hub=read_hub(asked, deadline_s=_HUB_S).repositories)


def _sightings(
    recipe: Recipe, store: Store, offline: bool, progress: Progress | None, unknown: dict[str, str]
) -> Mapping[str, Sighting]:
    try:
        return see_models(recipe, store, offline=offline, progress=progress)
    except InvalidInput:
        raise
    except UserError as error:
        unknown["memory"] = str(error)
        return see_models(recipe, store, offline=True)


def _plan(
    recipe: Recipe,
    store: Store,
    offline: bool,
    allowed: frozenset[str],
    found: tuple[Finding, ...],
    unknown: dict[str, str],
) -> tuple[Plan | None, tuple[Finding, ...]]:
    """The plan that a build would execute, and what preflight finds once its sources are settled."""
    if any(finding.stops for finding in found):
        unknown["plan"] = "a build is refused, see the findings"
        return None, found
    try:
        prepared = prepare(recipe, store, offline=offline, allowed=allowed)
    except SourceError as error:
        unknown["plan"] = str(error)
        return None, found
    known = {(finding.rule, finding.keys, finding.problem) for finding in found}
    more = (one for one in prepared.findings if (one.rule, one.keys, one.problem) not in known)
    return prepared.plan, (*found, *more)


def _memory(
    recipe: Recipe, models: Mapping[str, Sighting], emitted: GeneratedConfig, unknown: dict[str, str]
) -> MemoryPlan | None:
    ram = read_memory().total_bytes if isinstance(recipe.runtime, CpuRuntime) else None
    sizes = {role: one.sizes for role, one in models.items() if one.sizes is not None}
    unread = [f"the {role} is a {one.architecture}" for role, one in models.items() if one.sizes is None]
    if unread:
        unknown["memory"] = f"{', '.join(unread)}, whose sizes cannot be read"
        return None
    try:
        demand = deployment_spec(
            recipe,
            sizes,
            emitted.steps,
            ram,
            {role: _unexplained(one) for role, one in models.items()},
        )
        if demand is not None:
            fewer = [role for role, one in models.items() if _counted_share(recipe, role, one) > _MOST]
            if not fewer:
                return plan_memory(demand)
            unknown["memory"] = "; ".join(_miscounted(role, models[role]) for role in fewer)
            return None
    except UserError as error:  # a GPU that is not known, which preflight explains, or a data type
        unknown["memory"] = str(error)
        return None
    unknown.setdefault("memory", "offline, and the sizes of a model are not among those that we know")
    return None


def _doubts(recipe: Recipe, models: Mapping[str, Sighting]) -> tuple[str, ...]:
    """Checkpoints that hold much more than is counted, such as layers that predict more tokens."""
    more = [(role, one) for role, one in models.items() if _counted_share(recipe, role, one) < 2 - _MOST]
    return tuple(_miscounted(role, one) for role, one in more)


def _counted_share(recipe: Recipe, role: str, model: Sighting) -> float:
    """What is counted of a checkpoint that is served as it is, over what its files hold; 1 where nobody can tell.

    Of one that is not quantized, numbers are compared, since they may be published wider than they are served, and what
    is there besides is counted (`_unexplained`).
    """
    sizes, totals = model.sizes, model.totals
    chosen = (
        recipe.draft.quantization
        if role == DRAFT and recipe.draft is not None
        else recipe.quantization.format
    )
    if sizes is None or totals is None or not totals.bytes or chosen != "none":
        return 1.0
    if sizes.stored == "none":
        return max(1.0, sum(parameters(sizes).values()) / totals.weights)
    return weight_bytes(ModelSpec(role, sizes, format=sizes.stored)) / totals.bytes


def _miscounted(role: str, model: Sighting) -> str:
    assert model.sizes is not None, "the caller looked"
    assert model.totals is not None, "the caller looked"
    counted = weight_bytes(ModelSpec(role, model.sizes, format=model.sizes.stored)) / 2**30
    return (
        f"the files of the {role} hold {model.totals.bytes / 2**30:.1f} GiB, of which {counted:.1f} GiB would be "
        "explained by config.json: the checkpoint is not understood"
    )


def _performance(
    recipe: Recipe, memory: MemoryPlan, asked: WorkloadOptions, unknown: dict[str, str]
) -> Forecast | None:
    try:
        return forecast_recipe(
            recipe,
            memory.spec,
            acceptance=asked.acceptance,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            sequences=memory.sequences,
            gpu_hour=asked.prices.get(memory.spec.device),
        )
    except UserError as error:  # the GPU's peak rates are not among the data
        unknown["performance"] = str(error)
        return None


def _alternatives(recipe: Recipe, memory: MemoryPlan) -> tuple[Alternative, ...]:
    """Those that the recipe's rules and preflight let pass."""
    found = alternatives(recipe, memory.spec)
    return tuple(one for one in found if _passes(recipe.provenance, one.overrides))


def _passes(provenance: Provenance, overrides: tuple[str, ...]) -> bool:
    if provenance.file is None:
        return True
    try:
        changed = load_recipe(provenance.file, (*provenance.overrides, *overrides))
    except InvalidInput:
        return False
    return not any(finding.stops for finding in findings(changed, emitted=emission(changed)))


def _unexplained(model: Sighting) -> int:
    if model.totals is None or model.sizes is None or model.sizes.stored != "none":
        return 0
    return max(0, model.totals.weights - sum(parameters(model.sizes).values()))


def _bytes(model: Sighting) -> int | None:
    return model.totals.bytes if model.totals is not None else None


def _described(model: Sighting) -> str:
    if model.sizes is None and model.totals is None:
        return f"a {model.architecture}, whose sizes cannot be read"
    if model.totals is None:
        assert model.sizes is not None, "just looked at"
        count = sum(parameters(model.sizes).values())
        return f"{count:,} weights, counted from sizes that are {model.seen}"
    types = ", ".join(model.totals.dtypes)
    size = human_bytes(model.totals.bytes)
    return f"{model.totals.weights:,} weights of {types}, {size}, by the headers in {model.seen}"
