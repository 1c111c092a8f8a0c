"""How far to trust a computed figure: the bracket that four of five measurements of its class fall into.

A class is a quantity, the structure of the model (dense, or sparse: with experts), the format of its weights and the
generation of the GPU. `data/efficiency.yaml` has the classes that measurements check, with errors of measurements whose
whole set-up (model, GPU, split, lengths) was left out of the fit, and how many set-ups brackets hold that were set
without them (`brackets`). What no class is of has no bracket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from pipeline.contracts.gpus import gpu_generation
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.performance.constants import fitted_constants
from pipeline.store import Json

Quantity = Literal["throughput", "tpot", "ttft-idle", "ttft-loaded"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
QUANTITY_NAMES: Mapping[Quantity, str] = {
    "throughput": "output tokens a second",
    "tpot": "time between tokens",
    "ttft-idle": "first token, alone",
    "ttft-loaded": "first token under load, mean",
}
COVERAGE = 0.8  # share of set-ups that an interval covers
MANY_SET_UPS = 20  # of a class whose brackets are judged alone, and not with those of other classes
_TELLING = 0.05
_MOST_STAGES = 4  # figures of more pipeline stages are missed by up to half, in both directions


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
        short = self.shortened()
        return {"value": short.value, "low": short.low, "high": short.high}

    def _with(self, change: Callable[[float], float]) -> Estimate:
        if self.low is None or self.high is None:
            return Estimate(change(self.value))
        return Estimate(change(self.value), change(self.low), change(self.high))


def four_digits(value: float) -> float:
    """Round to four significant digits: more would pretend."""
    return float(f"{value:.4g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastErrors:
    """How far forecasts of a quantity are off, where the measured set-up was left out of the fit.

    Attributes:
        quantity: Quantity that was measured.
        count: Measurements.
        set_ups: Set-ups (model, format, GPU, split, lengths) that they are of.
        mean: Mean of absolute relative errors.
        median: Their median.
        p90: Their 90th percentile.
        bias: Median of the errors; above 0 the forecast is too much.
        covered: Share of set-ups within brackets that were set without them; None with one set-up alone.
        covered_error: Its standard error.
    """

    quantity: Quantity
    count: int
    set_ups: int
    mean: float
    median: float
    p90: float
    bias: float
    covered: float | None
    covered_error: float | None

    @property
    def tells_coverage(self) -> bool:
        """Whether there are enough set-ups to tell `COVERAGE` from five percent more or less."""
        return self.covered_error is not None and self.covered_error <= _TELLING


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureClass(ForecastErrors):
    """Errors of one class, and its bracket.

    Attributes:
        structure: "dense" or "sparse".
        format: Format of the weights.
        generation: Generation of the GPUs, as `contracts/data/gpus.yaml` names their constants.
        low: Lower end of the bracket: measured over computed, 1 at most.
        high: Upper end, 1 at least.
        unseen: Median of absolute errors with all of the model on this GPU left out of the fit.
        unseen_covered: Share of set-ups within the bracket then; None with one set-up alone.
    """

    structure: str
    format: str
    generation: str
    low: float
    high: float
    unseen: float
    unseen_covered: float | None

    @property
    def name(self) -> str:
        """Name for people: "dense fp8 on hopper"."""
        return (
            f"{self.structure} {'unquantized' if self.format == 'none' else self.format} on {self.generation}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JointErrors(ForecastErrors):
    """Errors of several classes together.

    Attributes:
        members: "dense", "sparse", or "small": classes of fewer than `MANY_SET_UPS` set-ups.
        classes: Classes that there are.
    """

    members: Literal["dense", "sparse", "small"]
    classes: int


@cache
def joint_errors() -> tuple[JointErrors, ...]:
    """List the errors of classes together."""
    return tuple(JointErrors(**entry) for entry in fitted_constants()["together"])


@cache
def figure_classes() -> tuple[FigureClass, ...]:
    """List the classes that measurements check."""
    return tuple(FigureClass(**entry) for entry in fitted_constants()["classes"])


def structure_of(model: ModelSpec, *, disaggregated: bool = False) -> str:
    """Return whether a model is "dense" or "sparse", and whether prompts are computed apart from answers."""
    return ("sparse" if model.sizes.experts else "dense") + " disaggregated" * disaggregated


@dataclass(frozen=True, slots=True)
class Trust:
    """Evidence for the figures of a deployment: the class of each quantity, and what else no measurement is of."""

    classes: Mapping[Quantity, FigureClass]
    name: str
    doubts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model: ModelSpec, device: str, *, speculates: bool = False, disaggregated: bool = False
    ) -> Trust:
        """Look up the classes of a model on a GPU; with speculation, nothing is checked."""
        kind = gpu_generation(device)
        form = model.format
        key = (structure_of(model, disaggregated=disaggregated), form, kind.constants)
        found = {
            figure_class.quantity: figure_class
            for figure_class in figure_classes()
            if (figure_class.structure, figure_class.format, figure_class.generation) == key and kind.measured
        }
        doubts = {
            "speculation": speculates,
            f"{model.split.pipeline} pipeline stages": model.split.pipeline > _MOST_STAGES,
        }
        named = f"{key[0]} models {'unquantized' if form == 'none' else f'in {form}'} on {device}"
        return cls(found, named, tuple(doubt for doubt, holds in doubts.items() if holds))

    def checks(self, quantity: Quantity) -> bool:
        """Tell whether measurements check a quantity."""
        return quantity in self.classes and not self.doubts

    def unchecked(self, quantity: Quantity) -> tuple[str, ...]:
        """List what of a quantity no measurement is of; empty if some are."""
        return self.doubts or (() if quantity in self.classes else (self.name,))

    def estimate(self, quantity: Quantity, value: float) -> Estimate:
        """Put the interval of its class around a figure; none where no measurement checks it."""
        if not self.checks(quantity):
            return Estimate(value)
        found = self.classes[quantity]
        return Estimate(value, value * found.low, value * found.high)
