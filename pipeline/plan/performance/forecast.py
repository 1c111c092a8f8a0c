"""Forecast of a recipe before it is built: first token, time between tokens, tokens a second, where its SLO breaks.

    forecast(demand, track, work, slo)     of a demand on memory, as `plan.memory` makes it
    forecast_recipe(recipe, demand)        at the recipe's own lengths

Requests are simulated (`queueing`) on a roofline of the engine's steps (`roofline`) whose constants are fitted to
published figures; `Estimate` says how far to trust a figure, and `Forecast.warnings` what no measurement checks.
Not modelled: reuse of prefixes, and speculation by n-grams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.contracts.gpus import gpu_rates
from pipeline.contracts.releases import Track
from pipeline.plan.memory import DeploymentSpec, plan_memory
from pipeline.plan.performance.calibration import (
    SpeedCalibration,
    deployment_model,
    model_name,
    overlaps_steps,
    proposed_tokens,
)
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine, best_length
from pipeline.plan.performance.estimates import QUANTITY_NAMES, Estimate, Quantity, Trust
from pipeline.plan.performance.queueing import WAVES, Percentiles, Workload
from pipeline.plan.performance.service import Cost, LoadLimit, LoadPoint, Service, token_cost
from pipeline.recipe import CpuRuntime, Recipe, Slo
from pipeline.store import Json

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # at which gains are listed


@dataclass(frozen=True, slots=True)
class RatePlan:
    """Replicas for requests that come at random, and what these see.

    Attributes:
        requests_per_s: Requests of all replicas together, at the day's peak.
        replicas: Replicas that meet the SLO; None: no number of them does.
        each: Highest rate of one replica within the SLO.
        load: Load of each replica at that peak.
    """

    requests_per_s: float
    replicas: int | None
    each: float
    load: LoadPoint | None


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of a draft at an acceptance."""

    acceptance: float
    alone: float  # times as fast for one request
    loaded: float  # ... at the largest load
    best_length: int  # tokens to propose for one request


@dataclass(frozen=True, slots=True)
class Forecast:
    """One deployment at one workload. All in milliseconds and tokens a second."""

    gpu: str
    gpus: int
    work: Workload
    sequences: int  # that memory holds from beginning to end
    concurrency: int  # ... and the limits let in
    wanted: int  # that the limits let in
    slo: Slo
    ttft_ms: Estimate  # of one request on an idle engine
    itl_ms: Estimate  # of one request
    curve: tuple[LoadPoint, ...]  # by requests at a time, to `wanted`
    within_slo: LoadPoint | None  # the largest load that meets the SLO; None: not even one request does
    ended_by: LoadLimit  # what ends it; "limits": max_concurrency, and memory holds more
    acceptance: float | None  # that the figures are with; None: without speculation
    gains: tuple[Gain, ...]  # of the draft; () without one
    trust: Trust | None  # what measurements check; None on a processor
    unchecked: tuple[str, ...] = ()  # what of the throughput no measurement is of; (): they check it
    lifted: LoadPoint | None = (
        None  # largest load within the SLO if max_concurrency were what memory holds, if larger
    )
    gpu_hour: float | None = None  # price of one GPU
    gpu_w: float | None = None  # most that one GPU takes
    rate: RatePlan | None = None  # replicas for the requests that were asked about
    calibration: SpeedCalibration | None = None  # whose constants it has; None: those of published figures

    @property
    def source(self) -> str:
        """Where its constants come from."""
        return "published figures" if self.calibration is None else self.calibration.source

    @property
    def is_gpu(self) -> bool:
        """Whether it is of GPUs, not of a processor."""
        return self.calibration is None or self.calibration.runtime != "cpu"

    def estimate(self, quantity: Quantity, value: float) -> Estimate:
        """Put an interval around a figure, by the measurements that check it."""
        if self.calibration is not None:
            names = {"throughput": "tokens_per_s", "tpot": "itl", "ttft-idle": "ttft_alone"}
            if quantity not in names:
                return Estimate(value)
            return self.calibration.estimate(names[quantity], value, self.unchecked)  # type: ignore[arg-type]
        return Estimate(value) if self.trust is None else self.trust.estimate(quantity, value)

    def interval(self, value: float) -> Estimate:
        """Put an interval around what shrinks as throughput grows, such as a cost."""
        rate = self.estimate("throughput", 1.0)
        if rate.low is None or rate.high is None:
            return Estimate(value)
        return Estimate(value, value / rate.high, value / rate.low)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Figures that were compared with nothing, as sentences."""
        if self.calibration is not None:
            return tuple(self._beyond_calibration(self.calibration))
        assert self.trust is not None, "it is of a GPU"
        missing: dict[tuple[str, ...], list[str]] = {}
        for quantity, name in QUANTITY_NAMES.items():
            if doubts := self.trust.unchecked(quantity):
                missing.setdefault(doubts, []).append(name)
        return tuple(
            f"not checked: {', '.join(names)}; no measurement is of {' and '.join(doubts)}"
            for doubts, names in missing.items()
        )

    def _beyond_calibration(self, calibration: SpeedCalibration) -> Iterator[str]:
        if self.unchecked:
            yield f"how far it is off is not known: the calibration has not measured {', '.join(self.unchecked)}"
        if calibration.undetermined:
            yield f"the measurements say nearly nothing of {', '.join(calibration.undetermined)}"

    @property
    def title(self) -> str:
        gpus = f"{self.gpus} x {self.gpu}" if self.gpus > 1 else self.gpu
        lengths = f"prompts of {self.work.prompt_tokens} and answers of {self.work.output_tokens} tokens"
        return f"speed on {gpus}, {lengths}"

    @property
    def has_slo(self) -> bool:
        return self.slo.ttft_p95_ms is not None or self.slo.itl_p95_ms is not None

    @property
    def meets_slo(self) -> bool | None:
        """With as many requests at a time as the limits let in, or with replicas for a rate; None without an SLO."""
        if not self.has_slo:
            return None
        if self.rate is not None:
            return self.rate.replicas is not None
        return self.within_slo is not None and self.within_slo.batch >= self.wanted

    @property
    def cost(self) -> Cost | None:
        """At the largest load within the SLO, if there is a price."""
        if self.gpu_hour is None or self.within_slo is None:
            return None
        return token_cost(self.within_slo, self.work, self.gpus, self.gpu_hour)

    @property
    def tokens_per_s(self) -> Estimate | None:
        """Output, of the whole deployment, at the largest load within the SLO."""
        load = self.within_slo
        return self.estimate("throughput", load.tokens_per_s) if load else None

    @property
    def tokens_per_s_per_gpu(self) -> Estimate | None:
        whole = self.tokens_per_s
        return whole.scaled(1 / self.gpus) if whole else None

    @property
    def kwh_per_million(self) -> float | None:
        """Energy of a million output tokens at the largest load within the SLO, if GPUs take the most they may."""
        if self.gpu_w is None or self.within_slo is None:
            return None
        return self.gpus * self.gpu_w / self.within_slo.tokens_per_s * 1e6 / 3.6e6

    def load_json(self, load: LoadPoint) -> Mapping[str, Json]:
        """Return the values of one load for JSON: means with their intervals, and percentiles."""
        first: Quantity = "ttft-loaded" if load.batch > 1 else "ttft-idle"
        return {
            "batch": load.batch,
            "ttft_mean_ms": self.estimate(first, load.ttft.mean).as_json(),
            "ttft_from_start_ms": _percentiles(load.ttft),
            "ttft_ms": _percentiles(load.settled_ttft),
            "ttft_p95_ms": round(load.ttft_ms, 1),
            "itl_ms": round(load.itl_ms, 3),
            "itl_mean_ms": self.estimate("tpot", load.itl_ms).as_json(),
            "itl_p50_ms": round(load.itl.p50, 3),
            "itl_p95_ms": round(load.itl_p95_ms, 3),
            "itl_p99_ms": round(load.itl.p99, 3),
            "tokens_per_s": round(load.tokens_per_s, 1),
            "user_tokens_per_s": round(load.user_tokens_per_s, 1),
        }

    def _rate_json(self) -> Mapping[str, Json] | None:
        if self.rate is None:
            return None
        replicas = self.rate.replicas
        return {
            "requests_per_s": self.rate.requests_per_s,
            "replicas": replicas,
            "gpus": None if replicas is None else replicas * self.gpus,
            "requests_per_s_each": round(self.rate.each, 4),
            "load": self.load_json(self.rate.load) if self.rate.load is not None else None,
            "price_per_hour": None
            if replicas is None or self.gpu_hour is None
            else replicas * self.gpus * self.gpu_hour,
            "kw": None if replicas is None or self.gpu_w is None else replicas * self.gpus * self.gpu_w / 1e3,
        }

    def as_json(self) -> Mapping[str, Json]:
        """Plain values, short figures."""
        return {
            "gpu": self.gpu,
            "gpus": self.gpus,
            "prompt_tokens": self.work.prompt_tokens,
            "output_tokens": self.work.output_tokens,
            "sequences": self.sequences,
            "concurrency": self.concurrency,
            "wanted": self.wanted,
            "meets_slo": self.meets_slo,
            "slo": self.slo.model_dump(mode="json"),
            "ttft_ms": self.ttft_ms.as_json(),
            "itl_ms": self.itl_ms.as_json(),
            "curve": [self.load_json(load) for load in self.curve],
            "within_slo": self.load_json(self.within_slo) if self.within_slo else None,
            "limits_lifted": self.load_json(self.lifted) if self.lifted else None,
            "ended_by": self.ended_by,
            "tokens_per_s": self.tokens_per_s.as_json() if self.tokens_per_s else None,
            "cost": self.cost.as_json(self.interval) if self.cost else None,
            "kwh_per_million_output": None
            if self.kwh_per_million is None
            else round(self.kwh_per_million, 4),
            "rate": self._rate_json(),
            "source": self.source,
            "warnings": list(self.warnings),
            "acceptance": self.acceptance,
            "gains": [
                {
                    "acceptance": gain.acceptance,
                    "alone": round(gain.alone, 2),
                    "loaded": round(gain.loaded, 2),
                    "best_draft_tokens": gain.best_length,
                }
                for gain in self.gains
            ],
        }


def _percentiles(found: Percentiles) -> dict[str, Json]:
    return {name: round(getattr(found, name), 1) for name in ("mean", "p50", "p95", "p99")}


def forecast(
    spec: DeploymentSpec,
    track: Track | None,
    work: Workload,
    slo: Slo,
    *,
    acceptance: float | None = None,
    draft_tokens: int = 0,
    chunked: bool = True,
    overlaps: bool = True,
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
        draft_tokens: Tokens that a round proposes.
        overlaps: Whether a step may be prepared while the last one runs, where the backend can.
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
    model = deployment_model(
        spec, track, calibration, chunked=chunked, draft_tokens=draft_tokens, overlaps=overlaps
    )
    engines, service = model.engines(), model.service(acceptance, waves=waves)
    most = min(held, spec.concurrency)
    best, ended = service.most_within(work, most, slo)
    limited = ended == "memory" and held > spec.concurrency
    lifted = _lifted(service, work, held, slo) if lift and limited else None
    curve = tuple(service.curve(work, spec.concurrency))
    target, alone, batch = spec.models[0], curve[0], (best or curve[-1]).batch
    trust, unchecked = None, tuple[str, ...]()
    if calibration is not None:
        unchecked = calibration.unchecked(spec, source, work, batch, drafts=service.speculates)
        first = calibration.unchecked(spec, source, work, 1, drafts=service.speculates)
        ttft = calibration.estimate("ttft_alone", alone.settled_ttft.p50, first)
        itl = calibration.estimate("itl", alone.itl_ms, first)
    else:
        trust = Trust.of(target, spec.device, speculates=service.speculates)
        unchecked = trust.unchecked("throughput")
        ttft = trust.estimate("ttft-idle", alone.settled_ttft.p50)
        itl = trust.estimate("tpot", alone.itl_ms)
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
        gains=_gains(engines, draft_tokens, most, work),
        trust=trust,
        unchecked=unchecked,
        lifted=lifted,
        gpu_hour=gpu_hour,
        gpu_w=gpu_w,
        rate=None if requests_per_s is None else _replicas(service, work, slo, requests_per_s),
        calibration=calibration,
    )


_MOST_LIFTED = 4096  # requests at a time that runtimes take at most


def _lifted(service: Service, work: Workload, held: int, slo: Slo) -> LoadPoint | None:
    """Find the largest load of what memory holds, whatever the limits."""
    most = min(held, _MOST_LIFTED)
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
        draft_tokens=proposed_tokens(recipe),
        chunked=recipe.scheduler.chunked_context,
        overlaps=overlaps_steps(recipe),
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
