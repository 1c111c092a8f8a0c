"""GPUs, splits, formats and drafts side by side: which of them serve a workload within the SLO, and at what cost.

The front is of loads, not of deployments: one deployment can be quick for few or cheap for many. Its two directions are
the mean time between tokens, and what a token takes: money where every GPU has a price, else seconds of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.contracts.gpu_rates import rates
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import Demand, StepLimits, demand_of, plan_memory
from pipeline.plan.performance.accuracy import fewest_requests
from pipeline.plan.performance.candidates import candidates
from pipeline.plan.performance.cost import Cost, cost
from pipeline.plan.performance.engine import Workload
from pipeline.plan.performance.forecast import UNDER_LOAD, Forecast, forecast_recipe
from pipeline.plan.performance.front import front
from pipeline.plan.performance.service import Load
from pipeline.plan.plan import TARGET
from pipeline.recipe import CpuRuntime, Recipe


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be compared, and for whom."""

    work: Workload
    devices: tuple[str, ...]
    prices: Mapping[str, float] = field(default_factory=dict)  # GPU -> of an hour of one
    acceptance: float | None = None  # of the draft; None: without drafts

    @property
    def priced(self) -> bool:
        """Whether all can be ranked by money."""
        return bool(self.devices) and all(device in self.prices for device in self.devices)


@dataclass(frozen=True, slots=True)
class Option:
    """One deployment."""

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
        """`2 x h100-sxm-80g fp8 + draft`."""
        return f"{self.tensor_parallel} x {self.gpu} {self.form}{' + draft' if self.draft else ''}"

    @property
    def best(self) -> Load | None:
        """The largest load within the SLO."""
        return self.forecast.within_slo if self.forecast is not None and not self.reasons else None

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What of it no published figure of throughput is of; (): they speak for it."""
        return self.forecast.unchecked if self.forecast is not None else ()

    @property
    def gpu_seconds(self) -> float:
        """For a million output tokens, at that load."""
        assert self.best is not None, "options that serve have one"
        return self.gpus / self.best.tokens_per_s * 1e6


@dataclass(frozen=True, slots=True)
class Place:
    """A load of an option, as a point of the front."""

    option: Option
    load: Load
    spent: float  # for a million output tokens: money, or seconds of a GPU

    @property
    def checked(self) -> bool:
        """Whether published figures speak for it."""
        return not self.option.unchecked and self.load.batch >= fewest_requests()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer."""

    recipe: Recipe
    question: Question
    serving: tuple[Option, ...]  # that meet the SLO with at least one request, the best first
    refused: tuple[Option, ...]  # the others, with reasons
    places: tuple[Place, ...]  # all loads within the SLO, of all that serve
    front: tuple[Place, ...]  # the quickest first

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of those that serve was compared with nothing, as sentences."""
        doubts = dict.fromkeys(doubt for option in self.serving for doubt in option.unchecked)
        counted = [
            f"{doubt} ({sum(doubt in option.unchecked for option in self.serving)})" for doubt in doubts
        ]
        named = (
            f"no bracket where no published figure is of the like: {', '.join(counted)}" if counted else ""
        )
        crowded = any(option.best is not None and option.best.batch > 1 for option in self.serving)
        return tuple(filter(None, (named, UNDER_LOAD if crowded else "")))


def compare(
    recipe: Recipe,
    sizes: Mapping[str, ModelSizes],
    question: Question,
    *,
    steps: Mapping[str, StepLimits] | None = None,
    judge: Callable[[Recipe], Sequence[str]] = lambda _: (),
) -> Comparison:
    """All combinations.

    Args:
        sizes: role -> model, of all of the recipe's models.
        steps: role -> what its runtime asks of an engine.
        judge: what else speaks against a recipe (preflight), as sentences; asked about those that would serve.
    """
    assert not isinstance(recipe.runtime, CpuRuntime), "the caller looked"
    drafts = question.acceptance is not None
    changed = candidates(recipe, sizes[TARGET], question.devices, drafts=drafts)
    options = [_option(one, sizes, question, steps, judge) for one in changed]
    serving = sorted((one for one in options if one.best is not None), key=_rank(question))
    refused = tuple(one for one in options if one.best is None)
    places = tuple(place for option in serving for place in _places(option, question))
    edge = front(places, lambda place: place.load.itl_ms, lambda place: place.spent)
    return Comparison(recipe, question, tuple(serving), refused, places, tuple(edge))


def _option(
    recipe: Recipe,
    sizes: Mapping[str, ModelSizes],
    question: Question,
    steps: Mapping[str, StepLimits] | None,
    judge: Callable[[Recipe], Sequence[str]],
) -> Option:
    demand = demand_of(recipe, sizes, steps)
    assert demand is not None, "sizes are of all models"
    assert not isinstance(recipe.runtime, CpuRuntime), "candidates are for GPUs"
    memory = plan_memory(demand)
    work = question.work
    seen = forecast_recipe(
        recipe,
        demand,
        acceptance=question.acceptance,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        sequences=memory.sequences,
    )
    best = seen.within_slo if seen is not None else None
    reasons = tuple(_reasons(demand, seen)) or tuple(judge(recipe))
    price = question.prices.get(demand.device)
    return Option(
        gpu=demand.device,
        tensor_parallel=recipe.runtime.tensor_parallel,
        form=recipe.quantization.format,
        kv_cache=demand.models[0].kv_cache,
        draft=recipe.draft is not None,
        gpus=demand.ranks,
        sequences=memory.sequences,
        forecast=seen,
        cost=cost(best, work, demand.ranks, price) if best is not None and price is not None else None,
        reasons=reasons,
        unverified=bool(rates(demand.device).unverified),
    )


def _reasons(demand: Demand, seen: Forecast | None) -> Iterator[str]:
    if seen is None:
        yield f"not one sequence of {demand.sequence_tokens} tokens fits beside the weights"
    elif seen.within_slo is None:
        alone, slo = seen.curve[0], seen.slo
        if slo.ttft_p95_ms is not None and alone.ttft_ms > slo.ttft_p95_ms:
            yield f"first token after {alone.ttft_ms:.0f} ms even alone; slo.ttft_p95_ms is {slo.ttft_p95_ms:g}"
        if slo.itl_p95_ms is not None and alone.itl_p95_ms > slo.itl_p95_ms:
            yield f"{alone.itl_p95_ms:.1f} ms between tokens even alone; slo.itl_p95_ms is {slo.itl_p95_ms:g}"


def _rank(question: Question) -> Callable[[Option], float]:
    if question.priced:
        return lambda option: option.cost.per_million_output if option.cost is not None else float("inf")
    return lambda option: option.gpu_seconds


def _places(option: Option, question: Question) -> Iterator[Place]:
    assert option.forecast is not None, "it serves"
    assert option.best is not None, "it serves"
    hour = question.prices[option.gpu] if question.priced else 3600.0
    loads = [load for load in option.forecast.curve if load.batch < option.best.batch]
    for load in (*loads, option.best):
        yield Place(option, load, option.gpus * hour / 3600 / load.tokens_per_s * 1e6)
