"""The forecast of a deployment: its figures, how far to trust each of them, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.plan.performance.calibration import (
    SpeedCalibration,
)
from pipeline.plan.performance.estimates import QUANTITY_NAMES, Estimate, Quantity, Trust
from pipeline.plan.performance.queueing import Percentiles, Workload
from pipeline.plan.performance.service import Cost, LoadLimit, LoadPoint, token_cost
from pipeline.plan.performance.splitting import ServerGroup, SplitPlan
from pipeline.recipe import Slo
from pipeline.store import Json

_OF_RATES: tuple[Quantity, ...] = ("tpot", "ttft-loaded")


@dataclass(frozen=True, slots=True)
class RatePlan:
    """Replicas for requests that come at random, and what these see.

    Attributes:
        requests_per_s: Requests of all replicas together, at the day's peak.
        replicas: Replicas that meet the SLO; None: no number of them does.
        each: Highest rate of one replica within the SLO.
        load: Load of each replica at that peak.
        split: Context and generation servers in their place; None: none meet the SLO, or the runtime has none.
        aggregated: Servers to compare `split` with: they do both, with the tensor parallelism that needs the fewest
            GPUs and as many requests as memory holds; None: as for `split`.
    """

    requests_per_s: float
    replicas: int | None
    each: float
    load: LoadPoint | None
    split: SplitPlan | None = None
    aggregated: ServerGroup | None = None


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
    trust: Trust | None  # what measurements check; None on a processor, or with a calibration
    split_trust: Trust | None  # ... of context and generation servers
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
        if self.rate is not None and self.rate.split is not None and self.split_trust is not None:
            for quantity in _OF_RATES:
                if doubts := self.split_trust.unchecked(quantity):
                    missing.setdefault(doubts, []).append(QUANTITY_NAMES[quantity])
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
            "aggregated": None
            if self.rate.aggregated is None
            else {"gpus": self.rate.aggregated.gpus, **_group_json(self.rate.aggregated)},
            "disaggregated": None if self.rate.split is None else self._split_json(self.rate.split),
        }

    def _split_json(self, plan: SplitPlan) -> Mapping[str, Json]:
        """Return the values of context and generation servers, with brackets of disaggregated measurements."""
        return {
            "gpus": plan.gpus,
            "context": _group_json(plan.context),
            "generation": _group_json(plan.generation),
            "load": replace(self, trust=self.split_trust, calibration=None).load_json(plan.load),
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


def _group_json(group: ServerGroup) -> Mapping[str, Json]:
    return {
        "servers": group.servers,
        "tensor_parallel": group.split.tensor,
        "expert_parallel": group.split.expert,
        "attention_dp": group.split.attention_dp,
        "requests_each": group.slots,
    }


def _percentiles(found: Percentiles) -> dict[str, Json]:
    return {name: round(getattr(found, name), 1) for name in ("mean", "p50", "p95", "p99")}
