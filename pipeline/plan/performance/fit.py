"""Fits the constants of the performance model to loads that were measured on one device.

A few loads of one model cannot tell ten constants apart. So each constant begins where published figures put it (of a
processor: at a guess), and what is minimized is how far forecasts are off, plus how far constants were moved
(a maximum a posteriori estimate): what the loads say nothing of stays where it was, and is named.

How far forecasts are off afterwards is told of loads that were left out: each is forecast from a fit to all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.plan.performance.calibration import (
    FIGURES,
    CalibratedConstants,
    CalibrationReach,
    Figure,
    FigureErrors,
    MeasuredLoad,
    SpeedCalibration,
    error_interval,
    median_error,
)
from pipeline.plan.performance.constants import Efficiency
from pipeline.plan.performance.queueing import LoadTrace, closed_loop
from pipeline.plan.performance.service import DeploymentModel

__all__ = ["CalibrationFit", "FitRow", "fit_calibration"]

_SHARES = ("memory", "cache", "arithmetic", "attention")
_TIMES = ("layer_s", "step_s", "sequence_s", "prompt_s", "request_s")
_BETWEEN = ("link", "exchange_s")  # where there are several GPUs
# Natural logarithms by which constants may well be off before anything was measured.
_SHARE_WIDTH, _TIME_WIDTH, _CPU_WIDTH = 0.25, 0.8, 1.5
_FRONT_END_WIDTH = 1.5  # those that were measured take 2.6, 27 and 125 ms for a request
# ... and by which a figure may well be off although all constants are right: first tokens under load depend on when
# clients ask.
_NOISE: Mapping[Figure, float] = {"ttft_alone": 0.05, "ttft_loaded": 0.4, "itl": 0.05, "tokens_per_s": 0.05}
_UNMOVED = 0.8  # of its width before: a constant that is as uncertain afterwards was not measured
_SIMULATIONS = 2  # of each load, with constants ever nearer
_CLOSE = 1e-5  # relative change at which a fit ends
_ODD = 3.0  # noise beyond which a figure counts less (soft L1)

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitRow:
    """One figure of one load: measured, and forecast with the constants before, fitted to all, fitted to the others."""

    load: MeasuredLoad
    figure: Figure
    measured: float
    before: float | None
    fitted: float
    left_out: float | None


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """Constants that were fitted, and how they do load by load."""

    calibration: SpeedCalibration
    rows: tuple[FitRow, ...]


def fit_calibration(
    model: DeploymentModel,
    loads: Sequence[MeasuredLoad],
    *,
    about: Mapping[str, Any],
    source: str,
) -> CalibrationFit:
    """Fit the constants of a device to loads that were measured on it.

    Args:
        model: The measured deployment, with the constants that the fit begins from.
        loads: One or more.
        about: Fields of the calibration: device, runtime, recipe, made and measured.
        source: Where the target comes from, as the recipe has it.

    Returns:
        The constants, with errors of loads that were left out of their fit.

    Raises:
        ImportError: scipy is not installed.
    """
    constants, unmoved = _fit(model, loads)
    others: dict[tuple[int, int, int], Efficiency | None] = {}
    for key in {_alike(load) for load in loads}:
        rest = [load for load in loads if _alike(load) != key]
        others[key] = _fit(model, rest)[0] if rest else None
    rows = tuple(
        row
        for load in loads
        for row in _rows(
            model, load, model.constants if model.spec.is_gpu else None, constants, others[_alike(load)]
        )
    )
    calibration = SpeedCalibration(
        **about,
        constants=CalibratedConstants.of(constants),
        undetermined=tuple(
            name.removesuffix("_s") + "_us" if name.endswith("_s") else name for name in unmoved
        ),
        errors={
            figure: _errors(found)
            for figure in FIGURES
            if (found := [row for row in rows if row.figure == figure])
        },
        reach=_reach(model, loads, source),
    )
    return CalibrationFit(calibration, rows)


def _computed(model: DeploymentModel, load: MeasuredLoad, constants: Efficiency) -> dict[Figure, float]:
    """The model's figures in place of those measured under a load."""
    point = model.service(load.acceptance, constants).at(load.concurrency, load.work)
    computed: dict[Figure, float] = {
        "ttft_alone": point.settled_ttft.p50,
        "ttft_loaded": point.ttft_ms,
        "itl": point.itl_ms,
        "tokens_per_s": point.tokens_per_s,
    }
    return {figure: computed[figure] for figure in load.figures()}


def _trace(model: DeploymentModel, load: MeasuredLoad, constants: Efficiency) -> LoadTrace:
    """Simulate a load once, so that its figures can be recomputed for constants nearby."""
    service = model.service(load.acceptance, constants)
    return LoadTrace.of(closed_loop(service.served, load.concurrency, load.work))


def _retraced(
    model: DeploymentModel, load: MeasuredLoad, trace: LoadTrace, constants: Efficiency
) -> dict[Figure, float]:
    found = trace.figures(model.engine(load.acceptance, constants).times)
    moved_s = constants.request_s - trace.request_s
    answer = load.work.output_tokens
    lasting_s = found["ttft"] + moved_s + (answer - 1) * found["tpot"]
    computed: dict[Figure, float] = {
        "ttft_alone": 1e3 * (found["ttft"] + moved_s),
        "ttft_loaded": 1e3 * (found["ttft_p95"] + moved_s),
        "itl": 1e3 * found["tpot"],
        "tokens_per_s": load.concurrency * answer / lasting_s,
    }
    return {figure: computed[figure] for figure in load.figures()}


def _alike(load: MeasuredLoad) -> tuple[int, int, int]:
    """Loads with the same key are left out together: one would tell of the other."""
    return load.concurrency, round(load.work.prompt_tokens, -1), round(load.work.output_tokens, -1)


def _fit(model: DeploymentModel, loads: Sequence[MeasuredLoad]) -> tuple[Efficiency, tuple[str, ...]]:
    """The constants, and the names of those that the loads say nothing of."""
    from scipy.optimize import least_squares

    is_cpu = not model.spec.is_gpu
    names = (*_SHARES, *_TIMES, *(_BETWEEN if model.spec.ranks > 1 else ()))
    widths = np.array(
        [
            _CPU_WIDTH
            if is_cpu
            else _FRONT_END_WIDTH
            if name == "request_s"
            else _TIME_WIDTH
            if name.endswith("_s")
            else _SHARE_WIDTH
            for name in names
        ]
    )
    start = model.constants
    begun = asdict(start)
    # In the logarithm, as multiples of the widths. A share of a peak is at most the whole of it.
    most = [
        math.inf if is_cpu or name.endswith("_s") else max(math.log(1 / begun[name]), 1e-6) / width
        for name, width in zip(names, widths, strict=True)
    ]

    def at(moved: Vector) -> Efficiency:
        changed = {name: begun[name] * math.exp(by) for name, by in zip(names, moved * widths, strict=True)}
        return replace(start, **changed)

    found: Any = None
    for _ in range(_SIMULATIONS):
        nearby = start if found is None else at(found.x)
        traces = [_trace(model, load, nearby) for load in loads]

        def residuals(moved: Vector, traces: Sequence[LoadTrace] = traces) -> Vector:
            return np.array([*_off(model, loads, traces, at(moved)), *moved])

        found = least_squares(
            residuals,
            np.zeros(len(names)) if found is None else found.x,
            bounds=(-np.inf, np.array(most)),
            loss="soft_l1",
            f_scale=_ODD,
            ftol=_CLOSE,
            xtol=_CLOSE,
        )
    # Standard deviations after, where each was 1 before.
    left = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    unmoved = tuple(name for name, width in zip(names, left, strict=True) if width > _UNMOVED)
    return at(found.x), unmoved


def _off(
    model: DeploymentModel, loads: Sequence[MeasuredLoad], traces: Sequence[LoadTrace], constants: Efficiency
) -> Iterator[float]:
    for load, trace in zip(loads, traces, strict=True):
        computed = _retraced(model, load, trace, constants)
        for figure, measured in load.figures().items():
            yield math.log(computed[figure] / measured) / _NOISE[figure]


def _rows(
    model: DeploymentModel,
    load: MeasuredLoad,
    before: Efficiency | None,
    fitted: Efficiency,
    left_out: Efficiency | None,
) -> Iterator[FitRow]:
    def computed(constants: Efficiency | None) -> Callable[[Figure], float | None]:
        found = {} if constants is None else _computed(model, load, constants)
        return found.get

    was, others = computed(before), computed(left_out)
    now = _computed(model, load, fitted)
    for figure, measured in load.figures().items():
        yield FitRow(load, figure, measured, was(figure), now[figure], others(figure))


def _errors(rows: Sequence[FitRow]) -> FigureErrors:
    before = [row.measured / row.before for row in rows if row.before is not None]
    left = [row.measured / row.left_out for row in rows if row.left_out is not None]
    low, high = error_interval(left) if left else (None, None)
    return FigureErrors(
        count=len(rows),
        before=median_error(before) if before else None,
        fitted=median_error([row.measured / row.fitted for row in rows]),
        left_out=median_error(left) if left else None,
        low=low,
        high=high,
    )


def _reach(model: DeploymentModel, loads: Sequence[MeasuredLoad], source: str) -> CalibrationReach:
    def ends(values: Sequence[int]) -> tuple[int, int]:
        return min(values), max(values)

    accepted = [load.acceptance for load in loads if load.acceptance is not None]
    return CalibrationReach(
        model=source,
        format=model.spec.models[0].format,
        gpus=model.spec.ranks,
        acceptance=round(sum(accepted) / len(accepted), 4) if accepted else None,
        concurrency=ends([load.concurrency for load in loads]),
        prompt_tokens=ends([load.work.prompt_tokens for load in loads]),
        output_tokens=ends([load.work.output_tokens for load in loads]),
    )
