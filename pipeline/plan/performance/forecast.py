"""Forecast of a recipe before it is built: first token, time between tokens, tokens a second, where its SLO breaks.

    forecast(demand, track, work, slo)     of a demand on memory, as `plan.memory` makes it
    forecast_recipe(recipe, demand)        at the recipe's own lengths

Figures are of a roofline (`step`) with constants fitted to published figures; `Estimate` says how far to trust them,
and `Forecast.warnings` of what nobody can say.
Not modelled: time outside the engine (network, tokenizer, Triton), reuse of prefixes, and speculation without a draft
model (n-gram, MTP).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.contracts.releases import Track
from pipeline.plan.memory import DeploymentSpec, plan_memory
from pipeline.plan.performance.accuracy import (
    Estimate,
    first_token_estimate,
    rate_estimate,
    unchecked,
)
from pipeline.plan.performance.calibration import (
    SpeedCalibration,
    deployment_model,
    model_name,
    overlaps_steps,
)
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine, Workload, best_length
from pipeline.plan.performance.service import Cost, LoadLimit, LoadPoint, token_cost
from pipeline.recipe import CpuRuntime, Recipe, Slo
from pipeline.store import Json

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # at which gains are listed
UNDER_LOAD = (
    "first tokens under load (p95), and what of the SLO depends on them, come from a queueing formula; measured ones "
    "often lie far from it"
)


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
    concurrency: int  # ... and the limits let in, and steps keep up with
    wanted: int  # that the limits let in
    slo: Slo
    ttft_ms: Estimate  # of one request on an idle engine
    itl_ms: Estimate  # of one request
    curve: tuple[LoadPoint, ...]  # by requests at a time, to `concurrency`
    within_slo: LoadPoint | None  # the largest load that meets the SLO; None: not even one request does
    ended_by: (
        LoadLimit  # what ends it; "memory" is the limits, too; "steps": prompts of new requests fill them
    )
    acceptance: float | None  # that the figures are with; None: without a draft's gain
    gains: tuple[Gain, ...]  # of the draft; () without one
    # What of it no published figure of throughput, or of a first token on an idle engine, is of; (): they speak for it.
    unchecked: tuple[str, ...] = ()
    unchecked_first: tuple[str, ...] = ()
    gpu_hour: float | None = None  # price of one GPU
    calibration: SpeedCalibration | None = None  # whose constants it has; None: those of published figures

    @property
    def source(self) -> str:
        """Where its constants come from."""
        return "published figures" if self.calibration is None else self.calibration.source

    @property
    def is_gpu(self) -> bool:
        """Whether it is of GPUs, not of a processor."""
        return self.calibration is None or self.calibration.runtime != "cpu"

    def rate(self, value: float) -> Estimate:
        """Put an interval around something that grows with throughput."""
        if self.calibration is not None:
            return self.calibration.estimate("tokens_per_s", value, self.unchecked)
        return rate_estimate(value, checked=not self.unchecked)

    def interval(self, value: float) -> Estimate:
        """Put an interval around what shrinks as throughput grows, such as a cost."""
        rate = self.rate(1.0)
        if rate.low is None or rate.high is None:
            return Estimate(value)
        return Estimate(value, value / rate.high, value / rate.low)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Figures that were compared with nothing, as sentences."""
        if self.calibration is not None:
            return tuple(self._beyond_calibration(self.calibration))
        draft = " and what a draft gains are" if self.gains else " is"
        return (
            *_of_nothing("throughput, and with it time between tokens and cost,", self.unchecked),
            *_of_nothing("the first token, alone,", self.unchecked_first),
            f"the time between tokens of one request alone{draft} compared with no published figure",
            *((UNDER_LOAD,) if self.concurrency > 1 else ()),
        )

    def _beyond_calibration(self, calibration: SpeedCalibration) -> Iterator[str]:
        if self.unchecked:
            yield f"how far it is off is not known: the calibration has not measured {', '.join(self.unchecked)}"
        if calibration.undetermined:
            yield f"the measurements say nearly nothing of {', '.join(calibration.undetermined)}"
        if self.concurrency > 1 and "ttft_loaded" not in calibration.errors:
            yield UNDER_LOAD

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
        """With as many requests at a time as the limits let in; None without an SLO."""
        if not self.has_slo:
            return None
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
        return self.rate(load.tokens_per_s) if load else None

    @property
    def tokens_per_s_per_gpu(self) -> Estimate | None:
        whole = self.tokens_per_s
        return whole.scaled(1 / self.gpus) if whole else None

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
            "curve": [load_json(load) for load in self.curve],
            "within_slo": load_json(self.within_slo) if self.within_slo else None,
            "ended_by": self.ended_by,
            "tokens_per_s": self.tokens_per_s.as_json() if self.tokens_per_s else None,
            "cost": self.cost.as_json(self.interval) if self.cost else None,
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


def load_json(load: LoadPoint) -> Mapping[str, Json]:
    """Return the values of one load for JSON, rounded."""
    return {
        "batch": load.batch,
        "ttft_p95_ms": round(load.ttft_ms, 1),
        "itl_ms": round(load.itl_ms, 2),
        "itl_p95_ms": round(load.itl_p95_ms, 2),
        "tokens_per_s": round(load.tokens_per_s, 1),
        "user_tokens_per_s": round(load.user_tokens_per_s, 1),
    }


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
    calibration: SpeedCalibration | None = None,
    source: str = "",
) -> Forecast | None:
    """Forecast a deployment; None if not even one request of the workload fits.

    Args:
        track: backend on a GPU; None on a processor, whose constants only a calibration has.
        acceptance: Acceptance of each drafted token, 0 to 1; None leaves the draft out of all but `gains`.
        draft_tokens: Tokens that the draft proposes in a round.
        overlaps: Whether a step may be prepared while the last one runs, where the backend can.
        sequences: Requests that memory holds; by default as `plan.memory` says.
        gpu_hour: price of an hour of one GPU.
        calibration: constants measured on this device; None: those of published figures.
        source: where the target comes from, which a calibration is compared with.
    """
    held = plan_memory(spec).sequences if sequences is None else sequences
    if held < 1:
        return None
    model = deployment_model(
        spec, track, calibration, chunked=chunked, draft_tokens=draft_tokens, overlaps=overlaps
    )
    engines, service = model.engines(), model.service(acceptance)
    most = min(held, spec.concurrency)
    best, ended = service.most_within(work, most, slo.ttft_p95_ms, slo.itl_p95_ms)
    curve = tuple(service.curve(work, most))
    target, alone = spec.models[0], curve[0]
    with_draft = service.speculation is not None
    batch = (best or curve[-1]).batch
    if calibration is not None:
        beyond = calibration.unchecked(spec, source, work, batch, drafts=with_draft)
        first = calibration.unchecked(spec, source, work, 1, drafts=with_draft)
        ttft = calibration.estimate("ttft_alone", alone.ttft_ms, first)
        itl = calibration.estimate("itl", alone.itl_ms, first)
    else:
        assert track is not None, "just looked at"
        beyond = unchecked("throughput", target, spec.device, track, batch=batch, drafts=with_draft)
        first = unchecked("first-token", target, spec.device, track)
        ttft = first_token_estimate(alone.ttft_ms, checked=not first)
        # No published figure is of one request.
        itl = Estimate(alone.itl_ms)
    return Forecast(
        gpu=spec.device,
        gpus=spec.ranks,
        work=work,
        sequences=held,
        concurrency=min(most, service.most_decoding(work)),
        wanted=spec.concurrency,
        slo=slo,
        ttft_ms=ttft,
        itl_ms=itl,
        curve=curve,
        within_slo=best,
        ended_by=ended,
        acceptance=acceptance if service.speculation else None,
        gains=_gains(engines, draft_tokens, min(most, service.most_decoding(work)), work),
        unchecked=beyond,
        unchecked_first=first,
        gpu_hour=gpu_hour,
        calibration=calibration,
    )


def _of_nothing(what: str, doubts: tuple[str, ...]) -> Iterator[str]:
    if doubts:
        yield f"how far {what} is off is not known: no published figure is of {', '.join(doubts)}"


def forecast_recipe(
    recipe: Recipe,
    spec: DeploymentSpec,
    *,
    acceptance: float | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    sequences: int | None = None,
    gpu_hour: float | None = None,
    calibration: SpeedCalibration | None = None,
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
        draft_tokens=recipe.draft.max_draft_tokens if recipe.draft else 0,
        chunked=recipe.scheduler.chunked_context,
        overlaps=overlaps_steps(recipe),
        sequences=sequences,
        gpu_hour=gpu_hour,
        calibration=calibration,
        source=model_name(recipe),
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
