"""`pipeline plan --accuracy`: the models of memory and speed against published measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from pipeline.plan.memory.accuracy import MeasurementErrors, capacity_accuracy, load_log_accuracy
from pipeline.plan.performance.accuracy import (
    FigureError,
    Use,
    error_summary,
    figure_errors,
    figure_source,
    quantile,
)
from pipeline.plan.performance.efficiency import fitted_constants
from pipeline.store import Json

_Group = tuple[str, str, str, str]  # source, kind, model with its format, GPUs


def accuracy_page(*, as_json: bool) -> str:
    """Memory: every point with its error, then median and worst. Speed: the figures held aside, set by set."""
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


def _table(part: MeasurementErrors, what: str) -> Iterator[str]:
    width = max(len(what), *(len(figure.what) for figure in part.figures))
    yield f"  {what:<{width}}  measured  computed   error"
    for figure in part.figures:
        yield f"  {figure.what:<{width}}  {figure.measured:>8g}  {figure.computed:>8.0f}  {figure.error:>+6.1%}"


def _speed_lines() -> Iterator[str]:
    """For people."""
    held, on = figure_errors("held-out"), fitted_constants()["fitted"]["on"]
    yield f"speed, of published figures that no constant was fitted to (constants of {on})"
    yield f"  {'kind':<12} {'model':<22} {'GPUs':<26} {'figures':>7} {'median':>7} {'lowest':>7} {'highest':>8}"
    for (name, kind, model, gpus), ones in _sets(held).items():
        errors = sorted(one.error for one in ones)
        typical = quantile(sorted(abs(error) for error in errors), 0.5)
        yield (
            f"  {kind:<12} {model:<22} {gpus:<26} {len(ones):>7} {typical:>7.1%} {errors[0]:>+7.0%}"
            f" {errors[-1]:>+8.0%}  {name}"
        )
    yield ""
    yield f"  {'all':<12} {'figures':>7} {'median':>7} {'9 of 10':>8}   measured / computed, four of five"
    titles: tuple[tuple[Use, str], ...] = (("held-out", "held aside"), ("calibrate", "fitted to"))
    for use, title in titles:
        for kind, one in error_summary(use).items():
            yield (
                f"  {kind:<12} {one['count']:>7} {one['median']:>7.1%} {one['p90']:>8.1%}"
                f"   {one['low']:.2f} to {one['high']:.2f}   {title}"
            )
    yield "  full-steps: full loads where prompts fill the steps before requests fill the memory"
    yield ""
    yield from sorted({f"{one.figure.source}: {figure_source(one.figure)}" for one in held})


def _speed_json() -> Mapping[str, Json]:
    """Every figure that was held aside, and the summaries of both parts."""
    return {
        "held_out": dict(error_summary("held-out").items()),
        "fitted_to": dict(error_summary("calibrate").items()),
        "figures": [
            {
                "what": one.figure.label,
                "kind": one.figure.kind,
                "measured": one.figure.measured,
                "computed": float(f"{one.computed:.4g}"),
                "error": round(one.error, 4),
                "source": figure_source(one.figure),
            }
            for one in figure_errors("held-out")
        ],
    }


def _sets(figures: Sequence[FigureError]) -> dict[_Group, list[FigureError]]:
    found: dict[_Group, list[FigureError]] = {}
    for one in figures:
        figure = one.figure
        ways = figure.split.world
        stages = f" PP{figure.split.pipeline}" if figure.split.pipeline > 1 else ""
        key = (figure.source, figure.kind, f"{figure.model} {figure.form}", f"{ways} x {figure.gpu}{stages}")
        found.setdefault(key, []).append(one)
    return found
