"""The report of `pipeline plan`: findings, plan, memory, speed, alternatives; and the ranking of `plan compare`.

The facts are gathered first (`pipeline.prepare.facts`, `pipeline.prepare.model_probe`); all else computes from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.errors import InvalidInput, SourceError, UserError
from pipeline.machine.host import read_processors
from pipeline.models.adapter import Adapter
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import (
    Alternative,
    MemoryPlan,
    alternatives,
    deployment_spec,
    plan_memory,
)
from pipeline.plan.memory.tensors import parameter_counts, published_bytes_by_format
from pipeline.plan.model_facts import facts_from_sizes
from pipeline.plan.performance import Forecast, forecast_recipe
from pipeline.plan.performance.calibration import SpeedCalibration
from pipeline.plan.performance.compare import Comparison, compare, comparison_settings
from pipeline.plan.plan import DRAFT, TARGET, Plan
from pipeline.plan.preflight import Finding, GeneratedConfig, allow, findings
from pipeline.plan.settings import ComparisonOptions, PlanSettings, WorkloadOptions
from pipeline.prepare.facts import (
    RecipeFacts,
    read_access,
    read_models,
    read_recipe_facts,
    read_settings,
    serving_memory_bytes,
)
from pipeline.prepare.model_probe import ModelProbe, probe_models
from pipeline.prepare.prepare import check_recipe, plan_build
from pipeline.progress import Progress
from pipeline.recipe import CpuRuntime, Recipe, RecipeProvenance, load_recipe
from pipeline.sources import is_offline
from pipeline.store import Store, human_bytes


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Plan, memory, speed and findings of one recipe on one kind of GPU, or on this machine (`cpu`)."""

    recipe: Recipe
    findings: tuple[Finding, ...]  # of preflight, the gravest first
    plan: Plan | None = None
    memory: MemoryPlan | None = None
    alternatives: tuple[Alternative, ...] = ()  # where it does not fit, or not at its concurrency
    performance: Forecast | None = None
    model_sources: Mapping[str, str] = field(
        default_factory=dict
    )  # role -> where its sizes are from, and its weights
    doubts: tuple[str, ...] = ()  # about what is counted of the models
    # "plan", "memory", "performance" -> why it is not known
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on figures without a measurement to compare them with: memory first, then speed."""
        memory = self.memory.warnings if self.memory is not None else ()
        performance = self.performance.warnings if self.performance is not None else ()
        return (*self.doubts, *memory, *performance)

    @property
    def refused(self) -> bool:
        """Whether a build would be refused, or its result could not run."""
        no_room = self.memory is not None and self.memory.verdict == "does not fit"
        return no_room or any(finding.stops for finding in self.findings)

    @property
    def meets_slo(self) -> bool | None:
        """Whether the forecast meets the SLO; None if the recipe has none, or there is no forecast."""
        return self.performance.meets_slo if self.performance is not None else None

    @property
    def verdict(self) -> str:
        """One sentence on memory, SLO and preflight.

        "fits: 66 x 9221 tokens at a time, 64 wanted; meets the SLO"
        """
        clauses = [_memory_words(self.memory)]
        if self.meets_slo is not None:
            missed = "does not meet the SLO with so many requests of such lengths"
            clauses.append("meets the SLO" if self.meets_slo else missed)
        errors = sum(finding.stops for finding in self.findings)
        if errors:
            clauses.append(f"refused by {errors} rule{'s' if errors > 1 else ''} of preflight")
        return "; ".join(clauses)


def _memory_words(memory: MemoryPlan | None) -> str:
    if memory is None:
        return "whether it fits is not known"
    spec = memory.spec
    capacity = f"{memory.sequences} x {spec.sequence_tokens} tokens at a time, {spec.concurrency} wanted"
    short = -memory.tightest.headroom
    if memory.verdict == "does not fit" and short > 0:
        place = "on a GPU" if spec.is_gpu else "for this machine's memory"
        return f"does not fit: {short / 2**30:.1f} GiB too much {place} before any KV cache"
    return f"{memory.verdict}: {capacity}"


# Of what the files of a checkpoint hold, that may be counted.
_MOST = 1.03


def make_report(
    recipe: Recipe,
    store: Store,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    allowed: frozenset[str] = frozenset(),
    workload: WorkloadOptions | None = None,
    calibration: SpeedCalibration | None = None,
) -> PlanReport:
    """Gather the facts of a recipe and work out everything that can be known of its build.

    What depends on a Hub that does not answer is left out, and `unknown` of the report says so.

    Args:
        offline: Do not ask the Hub; so does `HF_HUB_OFFLINE`.
        allowed: Ids of rules whose errors are let pass.
        workload: Lengths, prices and acceptance, beyond the recipe.
        calibration: Constants measured on the recipe's device; None: those of published figures.

    Raises:
        InvalidInput: A config.json that is here, or that the Hub gives, cannot be read.
    """
    unknown: dict[str, str] = {}
    offline = offline or is_offline()
    probes = _probes(recipe, store, offline, progress, unknown)
    facts = _with_probes(read_recipe_facts(recipe), probes)
    access = None if offline else read_access(recipe, store)
    ram, bf16 = serving_memory_bytes(recipe), read_processors().bf16

    report_findings = allow(facts.findings(access), allowed)
    plan, report_findings = _plan(facts, store, offline, allowed, report_findings, unknown)
    adapters = (
        read_models(plan, store)[TARGET].adapters if plan is not None else facts.models[TARGET].adapters
    )
    memory = _memory(recipe, probes, facts.emitted, ram, bf16, adapters, unknown)
    return PlanReport(
        recipe=recipe,
        findings=report_findings,
        plan=plan,
        memory=memory,
        alternatives=_alternatives(recipe, memory) if memory is not None else (),
        performance=_performance(recipe, memory, workload or WorkloadOptions(), calibration, unknown)
        if memory is not None
        else None,
        model_sources={role: _described(probe) for role, probe in probes.items()},
        doubts=_doubts(recipe, probes) if memory is not None else (),
        unknown=unknown,
    )


def compare_recipe(
    recipe: Recipe, store: Store, workload: ComparisonOptions, *, lifted: bool = True
) -> Comparison:
    """Rank GPUs, splits, formats and drafts for a recipe, each judged by preflight.

    Raises:
        UserError: The recipe is for `cpu`, or the sizes of its models are not known.
    """
    if isinstance(recipe.runtime, CpuRuntime):
        raise UserError(
            "only recipes with runtime.kind tensorrt or pytorch are compared; this one is for cpu"
        )
    probes = probe_models(recipe, store)
    sizes = {role: model.sizes for role, model in probes.items() if model.sizes is not None}
    for role in recipe.checkpoints:
        if role not in probes:
            raise UserError(f"the sizes of the {role} are not among those that we know; unset HF_HUB_OFFLINE")
        if role not in sizes:
            raise UserError(_unread(role, probes[role]))
    models = facts_from_sizes(sizes)

    def judge(changed: Recipe) -> tuple[str, ...]:
        objections = findings(changed, models, emitted=read_settings(changed))
        return tuple(f"{finding.problem} [{finding.rule}]" for finding in objections if finding.stops)

    steps = read_settings(recipe).steps
    question = comparison_settings(workload, recipe.limits)
    return compare(recipe, sizes, question, steps=steps, judge=judge, lifted=lifted)


def _probes(
    recipe: Recipe, store: Store, offline: bool, progress: Progress | None, unknown: dict[str, str]
) -> Mapping[str, ModelProbe]:
    try:
        return probe_models(recipe, store, offline=offline, progress=progress)
    except InvalidInput:
        check_recipe(recipe)  # refuses a folder that is missing together with everything else
        raise
    except UserError as error:
        unknown["memory"] = str(error)
        return probe_models(recipe, store, offline=True)


def _with_probes(facts: RecipeFacts, probes: Mapping[str, ModelProbe]) -> RecipeFacts:
    models = {
        role: replace(
            model,
            sizes=probe.sizes,
            architecture=probe.architecture,
            weight_bytes=None if probe.totals is None else probe.totals.bytes,
        )
        if (probe := probes.get(role)) is not None
        else model
        for role, model in facts.models.items()
    }
    return replace(facts, models=models)


def _plan(
    facts: RecipeFacts,
    store: Store,
    offline: bool,
    allowed: frozenset[str],
    report_findings: tuple[Finding, ...],
    unknown: dict[str, str],
) -> tuple[Plan | None, tuple[Finding, ...]]:
    """The plan that a build would execute, and what preflight finds once its sources are settled."""
    if any(finding.stops for finding in report_findings):
        unknown["plan"] = "a build is refused, see the findings"
        return None, report_findings
    try:
        prepared = plan_build(facts, store, offline=offline, allowed=allowed)
    except SourceError as error:
        unknown["plan"] = str(error)
        return None, report_findings
    known = {(finding.rule, finding.keys, finding.problem) for finding in report_findings}
    more = (
        finding for finding in prepared.findings if (finding.rule, finding.keys, finding.problem) not in known
    )
    return prepared.plan, (*report_findings, *more)


def _memory(
    recipe: Recipe,
    models: Mapping[str, ModelProbe],
    emitted: GeneratedConfig,
    ram: int | None,
    bf16: bool | None,
    adapters: Mapping[str, Adapter],
    unknown: dict[str, str],
) -> MemoryPlan | None:
    sizes = {role: model.sizes for role, model in models.items() if model.sizes is not None}
    unread = [_unread(role, model) for role, model in models.items() if model.sizes is None]
    if unread:
        unknown["memory"] = "; ".join(unread)
        return None
    try:
        demand = deployment_spec(
            recipe,
            sizes,
            emitted.steps,
            ram,
            {role: _unexplained(model) for role, model in models.items()},
            adapters,
            bf16,
        )
        if demand is not None:
            fewer = [role for role, model in models.items() if _counted_share(recipe, role, model) > _MOST]
            if not fewer:
                return plan_memory(demand)
            unknown["memory"] = "; ".join(_miscounted(role, models[role]) for role in fewer)
            return None
    except UserError as error:  # a GPU that is not known, which preflight explains, or a data type
        unknown["memory"] = str(error)
        return None
    unknown.setdefault("memory", "offline, and the sizes of a model are not among those that we know")
    return None


def _unread(role: str, model: ModelProbe) -> str:
    return f"the {role} is a {model.architecture}, whose sizes cannot be read: {model.unknown}"


def _doubts(recipe: Recipe, models: Mapping[str, ModelProbe]) -> tuple[str, ...]:
    """Checkpoints that hold much more than is counted, such as layers that predict more tokens."""
    more = [
        (role, model) for role, model in models.items() if _counted_share(recipe, role, model) < 2 - _MOST
    ]
    return tuple(_miscounted(role, model) for role, model in more)


def _counted_share(recipe: Recipe, role: str, model: ModelProbe) -> float:
    """Counted weights of a checkpoint that is served as it is, over those in its files; 1 where it is unknown.

    Of a checkpoint that is not quantized, numbers are compared, since they may be published wider than they are served,
    and what is there besides is counted (`_unexplained`).
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
        return max(1.0, _weights(sizes) / totals.weights)
    return _published(sizes) / totals.bytes


def _miscounted(role: str, model: ModelProbe) -> str:
    assert model.sizes is not None, "the caller looked"
    assert model.totals is not None, "the caller looked"
    counted = _published(model.sizes) / 2**30
    return (
        f"the files of the {role} hold {model.totals.bytes / 2**30:.1f} GiB, of which {counted:.1f} GiB would be "
        "explained by config.json: the checkpoint is not understood"
    )


def _performance(
    recipe: Recipe,
    memory: MemoryPlan,
    workload: WorkloadOptions,
    calibration: SpeedCalibration | None,
    unknown: dict[str, str],
) -> Forecast | None:
    try:
        return forecast_recipe(
            recipe,
            memory.spec,
            acceptance=workload.acceptance,
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            sequences=memory.sequences,
            gpu_hour=workload.prices.get(memory.spec.device),
            requests_per_s=workload.rate if isinstance(workload, PlanSettings) else None,
            calibration=calibration,
        )
    except UserError as error:  # the GPU's peak rates are not among the data
        unknown["performance"] = str(error)
        return None


def _alternatives(recipe: Recipe, memory: MemoryPlan) -> tuple[Alternative, ...]:
    """Alternatives that the recipe's rules and preflight let pass."""
    changes = alternatives(recipe, memory.spec)
    return tuple(change for change in changes if _passes(recipe.provenance, change.overrides))


def _passes(provenance: RecipeProvenance, overrides: tuple[str, ...]) -> bool:
    if provenance.file is None:
        return True
    try:
        changed = load_recipe(provenance.file, (*provenance.overrides, *overrides))
    except InvalidInput:
        return False
    return not any(finding.stops for finding in findings(changed, emitted=read_settings(changed)))


def _unexplained(model: ModelProbe) -> int:
    if model.totals is None or model.sizes is None or model.sizes.stored != "none":
        return 0
    return max(0, model.totals.weights - _weights(model.sizes))


def _weights(sizes: ModelSizes) -> int:
    """Weights in the files of a checkpoint: those that are loaded, and those that predict further tokens."""
    return sum(tensor.parameters for tensor in (*sizes.weights(), *sizes.draft))


def _published(sizes: ModelSizes) -> int:
    """Bytes of those weights as they are published."""
    return sum(published_bytes_by_format((*sizes.weights(), *sizes.draft), sizes.dtype).values())


def _described(model: ModelProbe) -> str:
    if model.sizes is None and model.totals is None:
        return f"a {model.architecture}, whose sizes cannot be read"
    if model.totals is None:
        assert model.sizes is not None, "just looked at"
        count = sum(parameter_counts(model.sizes).values())
        return f"{count:,} weights, counted from sizes that are {model.origin}"
    types = ", ".join(model.totals.dtypes)
    size = human_bytes(model.totals.bytes)
    return f"{model.totals.weights:,} weights of {types}, {size}, by the headers in {model.origin}"
