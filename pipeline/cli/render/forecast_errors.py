"""Errors of forecasts: against published figures (`pipeline plan accuracy`) and runs (`pipeline plan calibrate`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.render.speed import number, wrapped
from pipeline.plan.memory.accuracy import MeasurementErrors, capacity_accuracy, load_log_accuracy
from pipeline.plan.performance.accuracy import speculation_checks
from pipeline.plan.performance.calibration import FIGURE_NAMES, FIGURES, FigureErrors, SpeedCalibration
from pipeline.plan.performance.constants import fitted_constants
from pipeline.plan.performance.estimates import (
    MANY_SET_UPS,
    QUANTITIES,
    QUANTITY_NAMES,
    ForecastErrors,
    figure_classes,
    joint_errors,
)
from pipeline.plan.performance.fit import FitRow
from pipeline.plan.performance.published import figure_source, figures
from pipeline.store import Json

if TYPE_CHECKING:
    from pipeline.bench.forecast import BenchCalibration


_MEMBERS = {
    "dense": "all dense",
    "sparse": "all sparse",
    "small": f"all classes of fewer than {MANY_SET_UPS} set-ups",
}


def accuracy_page(*, as_json: bool) -> str:
    """Render every point of memory with its error, and the errors of speed, class by class."""
    parts = {"capacity": capacity_accuracy(), "load_log": load_log_accuracy()}
    if as_json:
        rows = {name: _row(part) for name, part in parts.items()}
        return json.dumps({**rows, "speed": _speed_json()}, indent=2)
    return "\n".join([*_lines(parts["capacity"], parts["load_log"]), "", *_speed_lines()])


def _row(part: MeasurementErrors) -> dict[str, object]:
    figures = [{**asdict(figure), "error": figure.error} for figure in part.figures]
    return {"median": part.median, "worst": part.worst, "figures": figures}


def _lines(capacity: MeasurementErrors, load_log: MeasurementErrors) -> Iterator[str]:
    yield "whole sequences of isl + osl + 1000 tokens that the KV cache holds"
    yield from _table(capacity, "GPU  model  memory fraction  isl + osl")
    yield f"{len(capacity.figures)} points: median error {capacity.median:.1%}, worst {capacity.worst:.1%}"
    yield ""
    yield "an engine's own log (its limits are not in it)"
    yield from _table(load_log, "figure")
    yield ""
    yield from sorted(
        {f"source: {figure.source}" for part in (capacity, load_log) for figure in part.figures}
    )


def _table(part: MeasurementErrors, label: str) -> Iterator[str]:
    width = max(len(label), *(len(figure.what) for figure in part.figures))
    yield f"  {label:<{width}}  measured  computed   error"
    for figure in part.figures:
        yield f"  {figure.what:<{width}}  {figure.measured:>8g}  {figure.computed:>8.0f}  {figure.error:>+6.1%}"


def _speed_lines() -> Iterator[str]:
    """Yield the errors of speed, class by class, for people."""
    on = fitted_constants()["fitted"]["on"]
    yield f"speed: errors of measurements whose set-up was left out of the fit (constants of {on})"
    for quantity in QUANTITIES:
        yield ""
        yield f"{QUANTITY_NAMES[quantity]}, by model, format and GPU"
        head = f"  {'class':<43} {'count':>5} {'set-ups':>7} {'mean':>6} {'median':>7} {'9 of 10':>8} {'bias':>6}"
        yield f"{head}   bracket            holds   model left out: median, holds"
        for group in (group for group in figure_classes() if group.quantity == quantity):
            yield (
                f"  {group.name:<43} {group.count:>5} {group.set_ups:>7} {group.mean:>6.1%} {group.median:>7.1%} "
                f"{group.p90:>8.1%} {group.bias:>+6.1%}"
                f"   {f'{group.low:.2f} to {group.high:.2f}':<13} {_coverage(group):>10}"
                f"   {group.unseen:>23.1%} {_held(group.unseen_covered):>6}"
            )
        for joint in (joint for joint in joint_errors() if joint.quantity == quantity):
            yield (
                f"  {_MEMBERS[joint.members]:<43} {joint.count:>5} {joint.set_ups:>7} {joint.mean:>6.1%} "
                f"{joint.median:>7.1%} {joint.p90:>8.1%} {joint.bias:>+6.1%}   {'':<13} {_coverage(joint):>10}"
            )
    yield ""
    yield from wrapped(
        "Set-ups (model, format, GPU, split, lengths) are left out together, from the fit and from what sets the "
        "brackets; in the last columns all of a model in a format on GPUs of a generation. Brackets are measured over "
        "computed, and shall hold 80% of set-ups; the standard error is beside it. A class with ? has too few set-ups "
        "to tell 80% from 75% or 85%. What no class is of is not checked: it has no bracket.",
        120,
    )
    yield ""
    yield "measurements that were never fitted"
    for check in fitted_constants()["checks"]:
        kind = f"{check['structure']} {'unquantized' if check['format'] == 'none' else check['format']}"
        name = f"{QUANTITY_NAMES[check['quantity']]}, {kind} on {check['generation']} ({check['source']})"
        yield (
            f"  {name:<75} {check['count']:>5} {check['mean']:>6.1%} {check['median']:>7.1%} {check['p90']:>8.1%} "
            f"{check['bias']:>+6.1%} {_held(check['covered']):>6}"
        )
    yield ""
    yield "gain of prediction layers (MTP) for one request, by the tokens that a round yielded; never fitted"
    yield f"  {'':<50} layers  tokens a round  measured  computed   error"
    for gain in speculation_checks():
        yield (
            f"  {gain.what:<50} {gain.layers:>6} {gain.tokens:>15.2f} {gain.measured:>9.2f} {gain.computed:>9.2f} "
            f"{gain.error:>+7.1%}"
        )
    yield ""
    yield from sorted({f"{figure.source}: {figure_source(figure)}" for figure in figures()})
    yield from sorted({f"mtp: {gain.source}" for gain in speculation_checks()})


def _coverage(group: ForecastErrors) -> str:
    if group.covered is None or group.covered_error is None:
        return "-"
    return f"{group.covered:.0%} ±{group.covered_error:.0%}{' ' if group.tells_coverage else '?'}"


def _held(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _speed_json() -> Mapping[str, Json]:
    """Classes with their errors, for JSON."""
    return {
        "fitted": dict(fitted_constants()["fitted"]),
        "classes": [asdict(group) for group in figure_classes()],
        "together": [asdict(joint) for joint in joint_errors()],
        "checks": list(fitted_constants()["checks"]),
        "speculation": [{**asdict(gain), "error": gain.error} for gain in speculation_checks()],
    }


_UNITS = {"memory": "GB/s", "cache": "GB/s", "arithmetic": "10^9/s", "attention": "10^9/s"}


def calibration_lines(calibration: BenchCalibration, path: Path | None, width: int) -> Iterator[str]:
    """Yield the page of a calibration in lines of `width` columns; `path` is None where it was not kept."""
    fitted = calibration.fit.calibration
    files = f"{len(fitted.measured)} file{'s' if len(fitted.measured) > 1 else ''}"
    yield f"{fitted.recipe} on {fitted.device}, runtime {fitted.runtime}: constants fitted to {files}"
    yield from (f"  {name}" for name in fitted.measured)
    yield ""
    yield "  how far forecasts are off (median)   loads   before   fitted   left out"
    yield from (
        _error_line(FIGURE_NAMES[figure], fitted.errors[figure])
        for figure in FIGURES
        if figure in fitted.errors
    )
    yield ""
    yield "  load                                 figure                      measured   before    left out"
    yield from (_calibration_row(row) for row in calibration.fit.rows)
    yield ""
    yield "  constants"
    yield from _constants(fitted)
    yield ""
    yield from wrapped(
        "left out: each load is forecast from a fit to the others, so that what is said of it was not learned from it.",
        width,
    )
    for text in _doubts(calibration):
        yield from wrapped(f"warning: {text}", width)
    yield ""
    if path is None:
        yield "not kept: half the figures of loads left out, or more, were forecast better before"
        yield "next: --output FILE.yaml writes it all the same"
        return
    yield f"wrote {path}"
    yield f"next: pipeline plan {fitted.recipe} takes it; with --calibration none it does not"


def calibration_json(calibration: BenchCalibration, path: Path | None) -> str:
    """The same as JSON."""
    rows = [
        {
            "source": row.load.source,
            "concurrency": row.load.concurrency,
            "prompt_tokens": row.load.work.prompt_tokens,
            "output_tokens": row.load.work.output_tokens,
            "figure": row.figure,
            "measured": round(row.measured, 3),
            "before": _rounded(row.before),
            "fitted": _rounded(row.fitted),
            "left_out": _rounded(row.left_out),
        }
        for row in calibration.fit.rows
    ]
    document = {
        "file": None if path is None else str(path),
        "calibration": calibration.fit.calibration.model_dump(mode="json", by_alias=True),
        "loads": rows,
        "warnings": list(_doubts(calibration)),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _error_line(name: str, errors: FigureErrors) -> str:
    before, fitted, left = map(_percent, (errors.before, errors.fitted, errors.left_out))
    return f"  {name:<36} {errors.count:>5} {before:>8} {fitted:>8} {left:>10}"


def _calibration_row(row: FitRow) -> str:
    before, left = (
        "-" if value is None else f"{value / row.measured - 1:+.0%}" for value in (row.before, row.left_out)
    )
    name = FIGURE_NAMES[row.figure]
    return f"  {row.load.label:<36} {name:<26} {number(row.measured):>9} {before:>8} {left:>11}"


def _constants(fitted: SpeedCalibration) -> Iterator[str]:
    for name, value in fitted.constants.model_dump().items():
        if isinstance(value, bool) or (name in ("link", "exchange_us") and fitted.reach.gpus == 1):
            continue
        unit = (
            "us"
            if name.endswith("_us")
            else _UNITS.get(name, "")
            if fitted.runtime == "cpu"
            else "of the peak"
        )
        unit = "" if name == "overlap" else unit
        doubt = "   (the loads say nearly nothing of it)" if name in fitted.undetermined else ""
        yield f"    {name.removesuffix('_us'):<12} {number(value):>8} {unit}{doubt}".rstrip()


def _doubts(calibration: BenchCalibration) -> Iterator[str]:
    fitted = calibration.fit.calibration
    for figure, errors in fitted.errors.items():
        if errors.left_out is None:
            continue
        if errors.before is not None and errors.left_out > errors.before:
            yield (
                f"{FIGURE_NAMES[figure]}: off by {errors.left_out:.0%} where loads are left out, and by "
                f"{errors.before:.0%} before: the calibration makes it no better"
            )
    if all(errors.left_out is None for errors in fitted.errors.values()):
        yield "with one load alone nothing is left to test the constants on: bench with --load concurrency=1,4,16"
    yield from (f"not used: {text}" for text in calibration.unfit)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
