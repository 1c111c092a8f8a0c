"""GPUs, splits, formats and drafts side by side: which of them serve a workload within the SLO, and at what cost.

The front is of loads, not of deployments: one deployment can be quick for few or cheap for many. Its two directions are
the mean time between tokens, and what a token takes: money where every GPU has a price, else seconds of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pipeline.contracts import engine_memory
from pipeline.contracts.gpus import format_issues, gpu, gpu_rates, gpus
from pipeline.contracts.rules import rule
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import DeploymentSpec, StepLimits, deployment_spec, plan_memory
from pipeline.plan.performance.forecast import Forecast
from pipeline.plan.performance.forecasting import forecast_recipe
from pipeline.plan.performance.queueing import WAVES, Workload
from pipeline.plan.performance.service import Cost, LoadPoint, token_cost
from pipeline.plan.plan import TARGET
from pipeline.plan.settings import ComparisonOptions
from pipeline.recipe import CpuRuntime, Limits, PyTorchRuntime, Recipe, TensorRTRuntime

_MOST = 1024  # requests at a time; beyond that, tokens are too slow for people
_WAVES = 4  # requests of each client in a simulation: many deployments are compared


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Which deployments are compared, under which traffic, at which prices."""

    work: Workload
    devices: tuple[str, ...]
    prices: Mapping[str, float] = field(default_factory=dict)  # GPU -> of an hour of one
    acceptance: float | None = None  # of the draft; None: without drafts

    @property
    def priced(self) -> bool:
        """Whether every GPU has a price, so that all can be ranked by money."""
        return bool(self.devices) and all(device in self.prices for device in self.devices)


def comparison_settings(options: ComparisonOptions, limits: Limits) -> ComparisonSettings:
    """Complete what a user asks by a recipe's limits: its longest prompt and answer, for lengths that are not given.

    Without devices, all GPUs are taken that have a price, or all that are known.
    """
    return ComparisonSettings(
        work=Workload(
            options.prompt_tokens or limits.max_input_tokens,
            options.output_tokens or limits.max_output_tokens,
        ),
        devices=options.devices or tuple(options.prices) or tuple(known.name for known in gpus()),
        prices=options.prices,
        acceptance=options.acceptance,
    )


@dataclass(frozen=True, slots=True)
class DeploymentOption:
    """One deployment that the recipe could be, and how it does."""

    gpu: str
    tensor_parallel: int
    form: str
    kv_cache: str  # data type
    draft: bool
    gpus: int
    sequences: int  # that memory holds
    forecast: Forecast | None
    cost: Cost | None  # at the largest load within the SLO, where the GPU has a price
    reasons: tuple[str, ...]  # why it cannot be had; (): it can
    unverified: bool  # rates of the GPU without a source at hand

    @property
    def label(self) -> str:
        """A name for people: "2 x h100-sxm-80g fp8 + draft"."""
        return f"{self.tensor_parallel} x {self.gpu} {self.form}{' + draft' if self.draft else ''}"

    @property
    def best(self) -> LoadPoint | None:
        """The largest load within the SLO."""
        return self.forecast.within_slo if self.forecast is not None and not self.reasons else None

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Parts of it that no measurement of throughput is of."""
        return self.forecast.unchecked if self.forecast is not None else ()

    @property
    def gpu_seconds(self) -> float:
        """Seconds of a GPU for a million output tokens, at the largest load within the SLO."""
        assert self.best is not None, "options that serve have one"
        return self.gpus / self.best.tokens_per_s * 1e6


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A load of an option, as a point of the front."""

    option: DeploymentOption
    load: LoadPoint
    spent: float  # for a million output tokens: money, or seconds of a GPU

    @property
    def checked(self) -> bool:
        """Whether measurements check it."""
        return not self.option.unchecked


@dataclass(frozen=True, slots=True)
class Comparison:
    """Deployments side by side: those that serve, those that do not, and the Pareto front of their loads."""

    recipe: Recipe
    question: ComparisonSettings
    # That meet the SLO with at least one request: those that measurements check first, and of them the best.
    serving: tuple[DeploymentOption, ...]
    refused: tuple[DeploymentOption, ...]  # the others, with reasons
    places: tuple[FrontPoint, ...]  # all loads within the SLO, of all that serve
    front: tuple[FrontPoint, ...]  # the quickest first

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what was computed without a measurement to compare it with."""
        doubts = dict.fromkeys(doubt for option in self.serving for doubt in option.unchecked)
        counted = [
            f"{doubt} ({sum(doubt in option.unchecked for option in self.serving)})" for doubt in doubts
        ]
        return (
            (f"not checked, and ranked apart: no measurement is of {', '.join(counted)}",) if counted else ()
        )


def compare(
    recipe: Recipe,
    sizes: Mapping[str, ModelSizes],
    question: ComparisonSettings,
    *,
    steps: Mapping[str, StepLimits] | None = None,
    judge: Callable[[Recipe], Sequence[str]] = lambda _: (),
    lifted: bool = True,
) -> Comparison:
    """Compare all GPUs, splits, formats and drafts that a recipe could have.

    Args:
        sizes: role -> model, of all of the recipe's models.
        steps: role -> what its runtime asks of an engine.
        judge: Gives further objections to a recipe (preflight), as sentences; asked about those that would serve.
        lifted: Let every deployment take what it holds, whatever the recipe's limit of requests at a time.
    """
    assert not isinstance(recipe.runtime, CpuRuntime), "the caller looked"
    drafts = question.acceptance is not None
    changed = candidates(recipe, sizes[TARGET], question.devices, drafts=drafts)
    options = [_option(variant, sizes, question, steps, judge, lifted) for variant in changed]
    serving = sorted((option for option in options if option.best is not None), key=_rank(question))
    refused = tuple(option for option in options if option.best is None)
    places = tuple(place for option in serving for place in _places(option, question))
    edge = pareto_front(places, lambda place: place.load.itl_ms, lambda place: place.spent)
    return Comparison(recipe, question, tuple(serving), refused, places, tuple(edge))


def _option(
    recipe: Recipe,
    sizes: Mapping[str, ModelSizes],
    question: ComparisonSettings,
    steps: Mapping[str, StepLimits] | None,
    judge: Callable[[Recipe], Sequence[str]],
    lifted: bool,
) -> DeploymentOption:
    spec = deployment_spec(recipe, sizes, steps)
    assert spec is not None, "sizes are of all models"
    assert not isinstance(recipe.runtime, CpuRuntime), "candidates are for GPUs"
    memory = plan_memory(spec)
    if lifted:
        spec = replace(spec, concurrency=max(1, min(memory.sequences, _MOST)))
    work = question.work
    seen = forecast_recipe(
        recipe,
        spec,
        acceptance=question.acceptance,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        sequences=memory.sequences,
        waves=_WAVES if lifted else WAVES,
        lift=False,
    )
    best = seen.within_slo if seen is not None else None
    reasons = tuple(_reasons(spec, seen)) or tuple(judge(recipe))
    price = question.prices.get(spec.device)
    return DeploymentOption(
        gpu=spec.device,
        tensor_parallel=recipe.runtime.tensor_parallel,
        form=recipe.quantization.format,
        kv_cache=spec.models[0].kv_cache,
        draft=recipe.draft is not None,
        gpus=spec.ranks,
        sequences=memory.sequences,
        forecast=seen,
        cost=token_cost(best, work, spec.ranks, price) if best is not None and price is not None else None,
        reasons=reasons,
        unverified=bool(gpu_rates(spec.device).unverified),
    )


def _reasons(spec: DeploymentSpec, seen: Forecast | None) -> Iterator[str]:
    if seen is None:
        yield f"not one sequence of {spec.sequence_tokens} tokens fits beside the weights"
    elif seen.within_slo is None:
        alone, slo = seen.curve[0], seen.slo
        if slo.ttft_p95_ms is not None and alone.ttft_ms > slo.ttft_p95_ms:
            yield f"first token after {alone.ttft_ms:.0f} ms even alone; slo.ttft_p95_ms is {slo.ttft_p95_ms:g}"
        if slo.itl_p95_ms is not None and alone.itl_p95_ms > slo.itl_p95_ms:
            yield f"{alone.itl_p95_ms:.1f} ms between tokens even alone; slo.itl_p95_ms is {slo.itl_p95_ms:g}"


def _rank(question: ComparisonSettings) -> Callable[[DeploymentOption], tuple[bool, float]]:
    def spent(option: DeploymentOption) -> float:
        if not question.priced:
            return option.gpu_seconds
        return option.cost.per_million_output if option.cost is not None else float("inf")

    return lambda option: (bool(option.unchecked), spent(option))


def _places(option: DeploymentOption, question: ComparisonSettings) -> Iterator[FrontPoint]:
    assert option.forecast is not None, "it serves"
    assert option.best is not None, "it serves"
    hour = question.prices[option.gpu] if question.priced else 3600.0
    loads = [load for load in option.forecast.curve if load.batch < option.best.batch]
    for load in (*loads, option.best):
        yield FrontPoint(option, load, option.gpus * hour / 3600 / load.tokens_per_s * 1e6)


FORMATS = ("none", "fp8", "int4_awq", "w4a8_awq", "nvfp4")
WAYS = (1, 2, 4, 8)


def candidates(
    recipe: Recipe, target: ModelSizes, devices: Sequence[str], *, drafts: bool
) -> Iterator[Recipe]:
    """Yield recipes with other GPUs, splits and formats, without the draft and with it.

    Left out are formats that a GPU or the release is known not to run, weights that are published in a format that is
    not understood, and splits that its heads cannot be shared by.
    `drafts`: with the recipe's draft, too.
    """
    assert not isinstance(recipe.runtime, CpuRuntime), "the caller looked"
    for device in devices:
        for form in _formats(recipe):
            kv_cache = _kv_cache(recipe.runtime, device, form)
            if kv_cache is None or (form == "none" and target.stored not in engine_memory.formats()):
                continue
            for ways in WAYS:
                if target.heads % ways:
                    continue
                changed = _changed(recipe, recipe.runtime, device, form, kv_cache, ways)
                yield changed.model_copy(update={"draft": None})
                if drafts and recipe.draft is not None:
                    yield changed


def _formats(recipe: Recipe) -> tuple[str, ...]:
    chosen = recipe.quantization.format
    return FORMATS if chosen in FORMATS else (*FORMATS, chosen)


def _kv_cache(runtime: TensorRTRuntime | PyTorchRuntime, device: str, form: str) -> str | None:
    """FP8 beside formats that go with it, where the GPU has it; None: the format cannot be had there."""
    kept: list[str] = rule("kvq.weight_combo").facts["kept_with"]
    for kv_cache in ("fp8", "auto") if form in kept else ("auto",):
        found = format_issues(gpu(device), form, kv_cache, runtime.kind, runtime.version)
        if not any(issue.severity == "error" for issue in found):
            return kv_cache
    return None


def _changed(
    recipe: Recipe,
    runtime: TensorRTRuntime | PyTorchRuntime,
    device: str,
    form: str,
    kv_cache: str,
    ways: int,
) -> Recipe:
    moved = {"gpu": device, "tensor_parallel": ways, "pipeline_parallel": 1}
    if runtime.expert_parallel is not None:
        moved["expert_parallel"] = ways
    quantized = {"format": form, "kv_cache": kv_cache}
    return recipe.model_copy(
        update={
            "runtime": runtime.model_copy(update=moved),
            "quantization": recipe.quantization.model_copy(update=quantized),
        }
    )


Point = TypeVar("Point")


def pareto_front(
    points: Sequence[Point], first: Callable[[Point], float], second: Callable[[Point], float]
) -> list[Point]:
    """Keep the points that no other beats in one direction without being worse in the other; less is better in both.

    In order of `first`. Of points that are alike in both, the first.

    >>> pareto_front([(1, 5), (2, 3), (3, 4), (4, 1), (2, 3)], lambda p: p[0], lambda p: p[1])
    [(1, 5), (2, 3), (4, 1)]
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (first(point), second(point))):
        if not kept or second(point) < second(kept[-1]):
            kept.append(point)
    return kept
