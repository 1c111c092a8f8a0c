"""How far the model is off on published figures, and the interval that a figure therefore has.

Figures are either fitted to (constants come from them) or held out. An interval covers 80 percent of those held out,
and only what they are of has one: `unchecked` names what no held-out figure covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.gpus import gpu, gpu_generation, gpu_rates
from pipeline.contracts.models import known_model
from pipeline.contracts.releases import Track
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.capacity import plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance.engine import EngineSpeed, Workload
from pipeline.plan.performance.roofline import ModelLoad, efficiency, fitted_constants, model_load
from pipeline.resources import parse_yaml
from pipeline.store import Json

Quantity = Literal["throughput", "first-token"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A computed value with the interval that four of five measurements fall into; no ends where it is not known."""

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float) -> Estimate:
        """Multiply value and ends by a factor above 0; ends that are not known stay unknown."""
        return self._with(lambda value: value * factor)

    def shortened(self) -> Estimate:
        """Round value and ends to four digits."""
        return self._with(four_digits)

    def as_json(self) -> dict[str, Json]:
        """Return value, low and high, rounded."""
        one = self.shortened()
        return {"value": one.value, "low": one.low, "high": one.high}

    def _with(self, change: Callable[[float], float]) -> Estimate:
        if self.low is None or self.high is None:
            return Estimate(change(self.value))
        return Estimate(change(self.value), change(self.low), change(self.high))


def rate_estimate(value: float, *, checked: bool) -> Estimate:
    """Estimate a figure that grows with throughput; its interval needs held-out figures (`checked`)."""
    low, high = _ends("throughput")
    return Estimate(value, value * low, value * high) if checked else Estimate(value)


def interval_estimate(value: float, *, checked: bool) -> Estimate:
    """Estimate a time between tokens, or a cost: what shrinks as throughput grows. Args as `rate_estimate`."""
    low, high = _ends("throughput")
    return Estimate(value, value / high, value / low) if checked else Estimate(value)


def first_token_estimate(value: float, *, checked: bool) -> Estimate:
    """Estimate a time to the first token on an idle engine. Args as `rate_estimate`."""
    low, high = _ends("first-token")
    return Estimate(value, value * low, value * high) if checked else Estimate(value)


def _ends(quantity: Quantity) -> tuple[float, float]:
    """Measured over computed. An interval always contains what was computed."""
    errors: Mapping[str, Mapping[str, float]] = fitted_constants()["errors"]["held-out"]
    return min(errors[quantity]["low"], 1.0), max(errors[quantity]["high"], 1.0)


def four_digits(value: float) -> float:
    """Round to four significant digits: more would pretend."""
    return float(f"{value:.4g}")


KINDS: tuple[Kind, ...] = ("full-load", "fixed-batch", "first-token")
COVERAGE = 0.8  # share of held-out figures that an interval covers
_MOST_STAGES = 4  # figures of more pipeline stages are missed by up to half, in both directions


@dataclass(frozen=True, slots=True)
class FigureError:
    """A published figure beside what the model computes."""

    figure: PublishedFigure
    computed: float

    @property
    def error(self) -> float:
        """Relative: -0.1 is ten percent too little."""
        return self.computed / self.figure.measured - 1

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of computed over measured."""
        return math.log(self.computed / self.figure.measured)


def figure_errors(use: Use, given: Mapping[str, Any] | None = None) -> tuple[FigureError, ...]:
    """Compute all published figures of one use.

    Args:
        given: Replaces the fitted constants.
    """
    return tuple(FigureError(figure, compute_figure(figure, given)) for figure in figures(use))


def checked_range(quantity: Quantity) -> dict[str, Any]:
    """Describe what held-out figures cover, as `data/efficiency.yaml` keeps it.

    Sets of `tracks`, `families` (of GPUs) and `formats`; `experts`, with the class, the format and the GPUs of models
    that have some; the most `gpus` of a deployment, and the smallest `batch` of requests at a time.
    """
    ones = [one for one in figures("held-out") if (one.kind == "first-token") == (quantity == "first-token")]
    return {
        "tracks": sorted({one.track for one in ones}),
        "families": sorted({gpu_generation(one.gpu).constants for one in ones}),
        "formats": sorted({one.form for one in ones}),
        "experts": sorted({_experts(one.need) for one in ones if one.need.sizes.experts}),
        "gpus": max(one.split.world for one in ones),
        "batch": min(one.batch or max_requests(one) for one in ones),
    }


def min_checked_requests() -> int:
    """Fewest requests at a time that a held-out figure of throughput has."""
    return int(fitted_constants()["reach"]["throughput"]["batch"])


def _experts(model: ModelSpec) -> str:
    gpus = model.split.world
    return f"{model.sizes.architecture} in {model.format} on {gpus} GPU{'s' if gpus > 1 else ''}"


def unchecked(
    quantity: Quantity, model: ModelSpec, device: str, track: Track, *, batch: int = 1, drafts: bool = False
) -> tuple[str, ...]:
    """List what of a deployment no held-out figure covers; empty if all of it is covered.

    Each dimension is looked at by itself: figures that were held aside are of combinations that no constant has seen.

    Args:
        batch: Requests at a time.
        drafts: Whether a draft's gain is in the forecast.
    """
    known, sizes, split = fitted_constants()["reach"][quantity], model.sizes, model.split
    kind = gpu_generation(device)
    doubts = {
        f"runtime.kind {track}": track not in known["tracks"],
        f"the generation of {device}": kind.constants not in known["families"] or not kind.measured,
        "unquantized weights" if model.format == "none" else f"weights in {model.format}": (
            model.format not in known["formats"]
        ),
        f"experts of {_experts(model)}": bool(sizes.experts) and _experts(model) not in known["experts"],
        "multi-head latent attention": sizes.latent is not None,
        "layers that see a window": any(sizes.windows),
        f"{split.pipeline} pipeline stages": split.pipeline > _MOST_STAGES,
        f"{split.world} GPUs": split.world > known["gpus"],
        "drafts": drafts,
        f"fewer than {known['batch']} requests at a time": batch < known["batch"],
    }
    return tuple(doubt for doubt, holds in doubts.items() if holds)


def error_summary(use: Use, given: Mapping[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """Map kinds of figures to how far off they are; `throughput` is both kinds of it, `full-steps` full loads whose
    steps prompts
    fill.

    Count; median and 90th percentile of the relative error; and the two ends of 80 percent of the ratios: `low` and
    `high` are measured over computed, what a computed figure is to be multiplied by.
    """
    everything = figure_errors(use, given)
    found: dict[str, list[FigureError]] = {
        kind: [one for one in everything if one.figure.kind == kind] for kind in KINDS
    }
    found["throughput"] = [one for one in everything if one.figure.kind != "first-token"]
    found["full-steps"] = [one for one in everything if fills_steps(one.figure)]
    return {name: summarize(ones) for name, ones in found.items()}


def summarize(ones: Sequence[FigureError]) -> dict[str, float]:
    """Summarize errors of figures: count, median, 90th percentile, and the ends of 80 percent of the ratios."""
    errors = sorted(abs(one.error) for one in ones)
    ratios = sorted(-one.log_ratio for one in ones)
    edge = (1 - COVERAGE) / 2
    return {
        "count": len(ones),
        "median": round(quantile(errors, 0.5), 3),
        "p90": round(quantile(errors, 0.9), 3),
        "low": round(math.exp(quantile(ratios, edge)), 3),
        "high": round(math.exp(quantile(ratios, 1 - edge)), 3),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate a quantile of ordered values; `share` is 0 to 1."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


Kind = Literal["full-load", "fixed-batch", "first-token"]
Use = Literal["calibrate", "held-out"]


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One published number: output tokens a second of all GPUs, or milliseconds for `first-token`."""

    kind: Kind
    use: Use
    model: str
    gpu: str
    form: str
    kv_cache: str
    split: Parallelism
    prompt_tokens: int
    output_tokens: int
    batch: int  # 0: as many as fit
    measured: float
    source: str

    @property
    def track(self) -> Track:
        """Backend that it was measured on."""
        return "pytorch" if self.kind == "full-load" else "tensorrt"

    @property
    def need(self) -> ModelSpec:
        """The model as it was run."""
        return ModelSpec("target", _sizes(self.model), self.split, self.form, self.kv_cache)

    @property
    def label(self) -> str:
        """A name for people: model, format, GPU, split and lengths."""
        split = f"TP{self.split.tensor}" + (f" PP{self.split.pipeline}" if self.split.pipeline > 1 else "")
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.model} {self.form} {self.gpu} {split} {self.prompt_tokens}/{self.output_tokens}{batch}"


def figures(use: Use | None = None) -> tuple[PublishedFigure, ...]:
    """List all published figures, or those of one use."""
    return tuple(figure for figure in _figures() if use is None or figure.use == use)


def compute_figure(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> float:
    """Compute what the model says in place of a figure, in its unit; `given` replaces the fitted constants."""
    engine, work = _engine(figure, given), Workload(figure.prompt_tokens, figure.output_tokens)
    if figure.kind == "first-token":
        return 1000 * engine.first_token(figure.prompt_tokens)
    if figure.kind == "fixed-batch":
        return figure.batch * figure.output_tokens / engine.static_batch(figure.batch, work)
    requests = full_load_requests(figure)
    return requests * figure.output_tokens / engine.run(requests, max_requests(figure), work)


def fills_steps(figure: PublishedFigure) -> bool:
    """Tell whether prompts fill the steps of a full load before the KV cache is full."""
    if figure.kind != "full-load":
        return False
    work = Workload(figure.prompt_tokens, figure.output_tokens)
    return _engine(figure, None).most_decoding(work) < min(max_requests(figure), full_load_requests(figure))


def _engine(figure: PublishedFigure, given: Mapping[str, Any] | None) -> EngineSpeed:
    constants = efficiency(figure.gpu, figure.track, given)
    return EngineSpeed(_load(figure), gpu_rates(figure.gpu), constants, figure.need.step_tokens)


@cache
def max_requests(figure: PublishedFigure) -> int:
    """Count the requests that the KV cache holds under full load."""
    device = gpu(figure.gpu)
    length = figure.prompt_tokens + figure.output_tokens
    spec = DeploymentSpec(device.name, device.driver_mib * 2**20, (figure.need,), length, concurrency=1)
    return max(1, min(plan_memory(spec).sequences, int(_data()["max_batch"])))


@cache
def _load(figure: PublishedFigure) -> ModelLoad:
    return model_load(figure.need, gpu_rates(figure.gpu))


def full_load_requests(figure: PublishedFigure) -> int:
    """Return how many requests wait at the start of a full load."""
    return int(_data()["requests"][f"{figure.prompt_tokens}/{figure.output_tokens}"])


def figure_source(figure: PublishedFigure) -> str:
    """Return where a figure was published."""
    return str(_data()["sources"][figure.source])


@cache
def _sizes(name: str) -> ModelSizes:
    entry = _data()["models"][name]
    known = known_model(entry["known"]) if "known" in entry else ModelSizes.from_config(entry)
    assert known is not None, f"{name} is among the data"
    return known


@cache
def _figures() -> tuple[PublishedFigure, ...]:
    return tuple(figure for table in _data()["tables"] for figure in _rows(table))


def _rows(table: Mapping[str, Any]) -> Iterator[PublishedFigure]:
    for row in table["rows"]:
        ways, pipeline = table.get("tensor", 1), table.get("pipeline", 1)
        batch, output = 0, 1
        if table["kind"] == "full-load":
            prompt, output, measured = row
            measured *= ways * pipeline if table["per_gpu"] else 1
        elif table["kind"] == "fixed-batch":
            batch, ways, prompt, output, measured = row
            measured *= ways
        else:
            ways, prompt, measured = row
            batch = 1
        yield PublishedFigure(
            kind=table["kind"],
            use=table["use"],
            model=table["model"],
            gpu=table["gpu"],
            form=table["format"],
            kv_cache=table["kv_cache"],
            split=Parallelism(ways, pipeline),
            prompt_tokens=prompt,
            output_tokens=output,
            batch=batch,
            measured=measured,
            source=table["source"],
        )


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.plan.performance") / "data" / "published.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
