"""Forecasts in the place of measurements that others published.

scripts/fit_performance fits the constants to them and writes, class by class, how far off those come out whose set-up
was left out of the fit (`estimates`). Each is simulated as it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pipeline.contracts.gpus import gpu, gpu_rates
from pipeline.plan.memory.capacity import plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance.constants import Efficiency, efficiency
from pipeline.plan.performance.disaggregated import DisaggregatedEngines, transfer_s
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine, token_acceptance
from pipeline.plan.performance.estimates import Quantity
from pipeline.plan.performance.model_load import ModelLoad, model_load
from pipeline.plan.performance.published import (
    SERVED,
    PublishedFigure,
    Servers,
    published_data,
    published_sizes,
)
from pipeline.plan.performance.queueing import QueueRun, Workload, all_at_once, closed_loop, open_arrivals
from pipeline.plan.performance.served_engine import PromptBalance, ServedEngine

_ENOUGH = 1_000_000  # pages and slots of figures whose memory was not the limit


def simulate_figure(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> QueueRun:
    """Simulate what was measured; `given` replaces the fitted constants."""
    if figure.context is not None:
        return closed_loop(_disaggregated(figure, figure.context, given), figure.batch, figure.work)
    engine = served_figure(figure, given)
    if figure.kind == "closed-loop":
        return closed_loop(engine, figure.batch, figure.work)
    if figure.kind == "open-loop":
        return open_arrivals(engine, figure.rate, figure.work, int(published_data()["open_requests"]))
    count = full_load_requests(figure) if figure.kind == "full-load" else figure.batch
    return all_at_once(engine, count, figure.work)


def compute_figure(
    figure: PublishedFigure, given: Mapping[str, Any] | None = None
) -> Mapping[Quantity, float]:
    """Compute what the model says in place of a measurement, in its units; `given` replaces the fitted constants."""
    run = simulate_figure(figure, given)
    return measured_units(figure, run.first_tokens_s.mean(), run.tpot_s, run.seconds, run.bundle)


def measured_units(
    figure: PublishedFigure, ttft_s: float, tpot_s: float, seconds: float, bundle: int
) -> Mapping[Quantity, float]:
    """Turn seconds of a simulation into the quantities of a figure, in its units.

    Args:
        ttft_s: Mean seconds to the first token.
        tpot_s: Mean seconds of a token after it.
        seconds: Seconds of all.
        bundle: Clients that each request of the simulation stands for.
    """
    answer = figure.output_tokens
    if figure.kind == "first-token":
        return {"ttft-idle": 1e3 * seconds}
    if figure.kind == "open-loop":
        return {"tpot": 1e3 * tpot_s, "ttft-loaded": 1e3 * ttft_s}
    if figure.kind in ("closed-loop", "disaggregated"):
        first: Quantity = "ttft-loaded" if figure.batch > 1 else "ttft-idle"
        rate = figure.batch * answer / (ttft_s + (answer - 1) * tpot_s)
        return {"throughput": rate, "tpot": 1e3 * tpot_s, first: 1e3 * ttft_s}
    count = full_load_requests(figure) if figure.kind == "full-load" else figure.batch
    return {"throughput": -(-count // bundle) * bundle * answer / seconds}


def figure_constants(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> Efficiency:
    """Look up the constants that hold for a figure."""
    return efficiency(figure.gpu, figure.track, given, pdl=figure.pdl)


def served_figure(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> ServedEngine:
    """Make a figure's engine as it was run."""
    groups = figure.split.request_groups
    roomy = figure.kind in ("fixed-batch", "first-token")
    constants = figure_constants(figure, given)
    speed = EngineSpeed(figure_load(figure), gpu_rates(figure.gpu), constants, figure.step_tokens)
    return ServedEngine(
        name=figure.label,
        times=speed.times,
        slots=_ENOUGH if roomy else int(published_data()["max_batch"]) * groups,
        blocks=_ENOUGH if roomy else _blocks(figure),
        step_tokens=figure.step_tokens * groups,
        ranks=groups,
        balance=PromptBalance(*figure.balance) if figure.balance is not None else None,
        chunked=figure.chunked,
        overlaps=constants.hides_step,
        gpus=figure.split.world,
        request_s=constants.request_s if figure.kind in SERVED else 0.0,
        admit_s=constants.admit_s if figure.kind in SERVED else 0.0,
    )


def _disaggregated(
    figure: PublishedFigure, context: Servers, given: Mapping[str, Any] | None
) -> DisaggregatedEngines:
    """Make a figure's servers as they were run."""
    generation = served_figure(replace(figure, context=None), given)
    slots = figure.slots * figure.split.request_groups
    rates = gpu_rates(figure.gpu)
    prompts = replace(figure, split=context.split, experts=context.experts, context=None)
    gpus = context.count * context.split.world + figure.generations * figure.split.world
    return DisaggregatedEngines(
        context=replace(served_figure(prompts, given), overlaps=False),
        contexts=context.count,
        generation=replace(generation, slots=slots),
        generations=figure.generations,
        token_s=transfer_s(prompts.need, figure.need, rates, figure_constants(figure, given), gpus),
    )


@cache
def _blocks(figure: PublishedFigure) -> int:
    """Pages of the KV cache; at least those of one request, where it ran although the plan has no room."""
    device, length = gpu(figure.gpu), figure.prompt_tokens + figure.output_tokens
    spec = DeploymentSpec(
        device.name,
        device.driver_mib * 2**20,
        (figure.need,),
        length,
        concurrency=1,
        fraction=figure.fraction,
    )
    return max(plan_memory(spec).blocks, -(-length // 32)) * figure.split.request_groups


@cache
def figure_load(figure: PublishedFigure) -> ModelLoad:
    """Count what a figure's model asks of a rank."""
    return model_load(figure.need, gpu_rates(figure.gpu))


@dataclass(frozen=True, slots=True)
class SpeculationCheck:
    """A published gain of prediction layers beside the computed one.

    Attributes:
        layers: Tokens that a round proposes.
        tokens: Tokens that a round yields, as published.
        measured: Times as fast as without speculation.
        computed: The same of the model, with the acceptance that yields so many tokens.
    """

    what: str
    source: str
    layers: int
    tokens: float
    measured: float
    computed: float

    @property
    def error(self) -> float:
        """Relative error: -0.1 is ten percent too little."""
        return self.computed / self.measured - 1


def speculation_checks() -> list[SpeculationCheck]:
    """Compute published gains of speculation for one request."""
    found = []
    for table in published_data()["speculation"]:
        split = Parallelism(table["tensor"], expert=table["expert"])
        need = ModelSpec("target", published_sizes(table["model"]), split, table["format"], table["kv_cache"])
        target = EngineSpeed.of(need, table["gpu"], "pytorch")
        context = Workload(table["prompt"], table["answer"]).mean_context
        what = f"{table['model']} {table['format']} {table['gpu']} TP{split.tensor} EP{split.expert}"
        for layers, tokens, measured in table["rows"]:
            acceptance = token_acceptance((tokens - 1) / layers, layers)
            engine = SpeculativeEngine.with_layers(target, layers, acceptance)
            gain = engine.gain(1, context)
            found.append(
                SpeculationCheck(
                    what, str(published_data()["sources"][table["source"]]), layers, tokens, measured, gain
                )
            )
    return found


def full_load_requests(figure: PublishedFigure) -> int:
    """Return how many requests wait at the start of a full load."""
    return int(published_data()["requests"][f"{figure.prompt_tokens}/{figure.output_tokens}"])
