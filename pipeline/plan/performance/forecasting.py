"""Forecast of a recipe before it is built: first token, time between tokens, tokens a second, where its SLO breaks.

    forecast(demand, track, work, slo)     of a demand on memory, as `plan.memory` makes it
    forecast_recipe(recipe, demand)        at the recipe's own lengths

Requests are simulated (`queueing`) on a roofline of the engine's steps (`roofline`) whose constants are fitted to
published figures; `Estimate` says how far to trust a figure, and `Forecast.warnings` what no measurement checks.
Not modelled: reuse of prefixes, and speculation by n-grams.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.contracts.gpus import gpu_rates
from pipeline.contracts.releases import Track
from pipeline.plan.memory import DeploymentSpec, plan_memory
from pipeline.plan.performance.calibration import (
    SpeedCalibration,
    deployment_model,
    engine_options,
    model_name,
)
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine, best_length
from pipeline.plan.performance.estimates import Trust
from pipeline.plan.performance.forecast import Forecast, Gain, RatePlan
from pipeline.plan.performance.queueing import WAVES, Workload
from pipeline.plan.performance.service import (
    DEFAULT_OPTIONS,
    MOST_REQUESTS,
    DeploymentModel,
    EngineOptions,
    LoadPoint,
    Service,
)
from pipeline.plan.performance.splitting import plan_aggregated, plan_split
from pipeline.recipe import CpuRuntime, Recipe, Slo

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # at which gains are listed


def forecast(
    spec: DeploymentSpec,
    track: Track | None,
    work: Workload,
    slo: Slo,
    *,
    acceptance: float | None = None,
    options: EngineOptions = DEFAULT_OPTIONS,
    sequences: int | None = None,
    gpu_hour: float | None = None,
    gpu_w: float | None = None,
    requests_per_s: float | None = None,
    calibration: SpeedCalibration | None = None,
    source: str = "",
    waves: int = WAVES,
    lift: bool = True,
) -> Forecast | None:
    """Forecast a deployment; None if not even one request of the workload fits.

    Args:
        track: backend on a GPU; None on a processor, whose constants only a calibration has.
        acceptance: Acceptance of each proposed token, 0 to 1; None leaves speculation out of all but `gains`.
        options: Settings of the engine.
        sequences: Requests that memory holds; by default as `plan.memory` says.
        gpu_hour: price of an hour of one GPU.
        gpu_w: watts that one GPU takes at most.
        requests_per_s: requests a second for which replicas are counted; None: they are not.
        calibration: constants measured on this device; None: those of published figures.
        source: where the target comes from, which a calibration is compared with.
        waves: requests of each client in a simulation.
        lift: Whether to look for the largest load without the limits of the recipe, too.
    """
    held = plan_memory(spec).sequences if sequences is None else sequences
    if held < 1:
        return None

    def make(spec: DeploymentSpec) -> DeploymentModel:
        return deployment_model(spec, track, calibration, options)

    model = make(spec)
    engines, service = model.engines(), model.service(acceptance, waves=waves)
    most = min(held, spec.concurrency)
    best, ended = service.most_within(work, most, slo)
    limited = ended == "memory" and held > spec.concurrency
    lifted = _lifted(service, work, held, slo) if lift and limited else None
    curve = tuple(service.curve(work, spec.concurrency))
    target, alone, batch = spec.models[0], curve[0], (best or curve[-1]).batch
    trust, split_trust, unchecked = None, None, tuple[str, ...]()
    if calibration is not None:
        unchecked = calibration.unchecked(spec, source, work, batch, drafts=service.speculates)
        first = calibration.unchecked(spec, source, work, 1, drafts=service.speculates)
        ttft = calibration.estimate("ttft_alone", alone.settled_ttft.p50, first)
        itl = calibration.estimate("itl", alone.itl_ms, first)
    else:
        trust = Trust.of(target, spec.device, speculates=service.speculates)
        split_trust = Trust.of(target, spec.device, speculates=service.speculates, disaggregated=True)
        unchecked = trust.unchecked("throughput")
        ttft = trust.estimate("ttft-idle", alone.settled_ttft.p50)
        itl = trust.estimate("tpot", alone.itl_ms)
    rate = None if requests_per_s is None else _replicas(service, work, slo, requests_per_s)
    if rate is not None and track == "pytorch":
        split = plan_split(make, spec, work, slo, rate.requests_per_s, acceptance)
        whole = plan_aggregated(make, spec, work, slo, rate.requests_per_s, acceptance)
        rate = replace(rate, split=split, aggregated=whole)
    return Forecast(
        gpu=spec.device,
        gpus=spec.ranks,
        work=work,
        sequences=held,
        concurrency=most,
        wanted=spec.concurrency,
        slo=slo,
        ttft_ms=ttft,
        itl_ms=itl,
        curve=curve,
        within_slo=best,
        ended_by="limits" if limited else ended,
        acceptance=acceptance if service.speculates else None,
        gains=_gains(engines, options.draft_tokens, most, work),
        trust=trust,
        split_trust=split_trust,
        unchecked=unchecked,
        lifted=lifted,
        gpu_hour=gpu_hour,
        gpu_w=gpu_w,
        rate=rate,
        calibration=calibration,
    )


def _lifted(service: Service, work: Workload, held: int, slo: Slo) -> LoadPoint | None:
    """Find the largest load of what memory holds, whatever the limits."""
    most = min(held, MOST_REQUESTS)
    found, _ = replace(service, slots=most).most_within(work, most, slo)
    return found


def _replicas(service: Service, work: Workload, slo: Slo, requests_per_s: float) -> RatePlan:
    """Count replicas for so many requests a second, which are spread evenly over them."""
    found = service.most_requests_per_s(work, slo)
    if found is None:
        return RatePlan(requests_per_s, None, 0.0, None)
    each, _ = found
    replicas = math.ceil(requests_per_s / each)
    return RatePlan(requests_per_s, replicas, each, service.at_rate(requests_per_s / replicas, work))


def forecast_recipe(
    recipe: Recipe,
    spec: DeploymentSpec,
    *,
    acceptance: float | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    sequences: int | None = None,
    gpu_hour: float | None = None,
    requests_per_s: float | None = None,
    calibration: SpeedCalibration | None = None,
    waves: int = WAVES,
    lift: bool = True,
) -> Forecast | None:
    """Forecast a recipe at its longest prompts and answers, or at those given; the others as for `forecast`.

    Args:
        acceptance: None counts the draft, too, if it was measured with the calibration.

    Returns:
        None for `cpu` without a calibration, and where not one request fits.

    Raises:
        UserError: The speed of the GPU is not known.
    """
    if isinstance(recipe.runtime, CpuRuntime) and calibration is None:
        return None
    if acceptance is None and calibration is not None and recipe.draft is not None:
        acceptance = calibration.reach.acceptance
    limits = recipe.limits
    work = Workload(prompt_tokens or limits.max_input_tokens, output_tokens or limits.max_output_tokens)
    return forecast(
        spec,
        None if recipe.runtime.kind == "cpu" else recipe.runtime.kind,
        work,
        recipe.slo,
        acceptance=acceptance,
        options=engine_options(recipe),
        sequences=sequences,
        gpu_hour=gpu_hour,
        gpu_w=None if recipe.runtime.kind == "cpu" else gpu_rates(recipe.runtime.gpu).tdp_w,
        requests_per_s=requests_per_s,
        calibration=calibration,
        source=model_name(recipe),
        waves=waves,
        lift=lift,
    )


def _gains(engines: list[EngineSpeed], draft_tokens: int, most: int, work: Workload) -> tuple[Gain, ...]:
    if len(engines) == 1:
        return ()
    target, draft = engines
    return tuple(
        Gain(
            acceptance,
            SpeculativeEngine(target, draft, draft_tokens, acceptance).gain(1, work.mean_context),
            SpeculativeEngine(target, draft, draft_tokens, acceptance).gain(most, work.mean_context),
            best_length(target, draft, acceptance, 1, work.mean_context),
        )
        for acceptance in ACCEPTANCES
    )
