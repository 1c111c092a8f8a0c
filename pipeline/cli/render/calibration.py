"""What `pipeline plan --calibrate-from` prints: how far the forecast was off before and after, and the constants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.bench.forecast import BenchCalibration
from pipeline.cli.render.speed import number, wrapped
from pipeline.plan.performance.calibration import FIGURE_NAMES, FIGURES, FigureErrors, SpeedCalibration
from pipeline.plan.performance.fit import FitRow

_UNITS = {"memory": "GB/s", "cache": "GB/s", "arithmetic": "10^9/s", "attention": "10^9/s"}


def calibration_lines(found: BenchCalibration, path: Path, width: int) -> Iterator[str]:
    """Yield the page of a calibration.

    Args:
        found: The fit.
        path: Where it was written.
        width: Columns.
    """
    made = found.fit.calibration
    files = f"{len(made.measured)} file{'s' if len(made.measured) > 1 else ''}"
    yield f"{made.recipe} on {made.device}, runtime {made.runtime}: constants fitted to {files}"
    yield from (f"  {name}" for name in made.measured)
    yield ""
    yield "  how far forecasts are off (median)   loads   before   fitted   left out"
    yield from (
        _error_line(FIGURE_NAMES[figure], made.errors[figure]) for figure in FIGURES if figure in made.errors
    )
    yield ""
    yield "  load                                 figure                      measured   before    left out"
    yield from (_row(row) for row in found.fit.rows)
    yield ""
    yield "  constants"
    yield from _constants(made)
    yield ""
    yield from wrapped(
        "left out: each load is forecast from a fit to the others, so that what is said of it was not learned from it.",
        width,
    )
    for text in _doubts(found):
        yield from wrapped(f"warning: {text}", width)
    yield ""
    yield f"wrote {path}"
    yield f"next: pipeline plan {made.recipe} takes it; --no-calibration does not"


def calibration_json(found: BenchCalibration, path: Path) -> str:
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
        for row in found.fit.rows
    ]
    document = {
        "file": str(path),
        "calibration": found.fit.calibration.model_dump(mode="json", by_alias=True),
        "loads": rows,
        "warnings": list(_doubts(found)),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _error_line(name: str, errors: FigureErrors) -> str:
    before, fitted, left = map(_percent, (errors.before, errors.fitted, errors.left_out))
    return f"  {name:<36} {errors.count:>5} {before:>8} {fitted:>8} {left:>10}"


def _row(row: FitRow) -> str:
    before, left = (
        "-" if value is None else f"{value / row.measured - 1:+.0%}" for value in (row.before, row.left_out)
    )
    name = FIGURE_NAMES[row.figure]
    return f"  {row.load.label:<36} {name:<26} {number(row.measured):>9} {before:>8} {left:>11}"


def _constants(made: SpeedCalibration) -> Iterator[str]:
    for name, value in made.constants.model_dump().items():
        if isinstance(value, bool) or (name in ("link", "exchange_us") and made.reach.gpus == 1):
            continue
        unit = (
            "us" if name.endswith("_us") else _UNITS.get(name, "") if made.runtime == "cpu" else "of the peak"
        )
        unit = "" if name == "overlap" else unit
        kept = "   (the loads say nearly nothing of it)" if name in made.undetermined else ""
        yield f"    {name.removesuffix('_us'):<12} {number(value):>8} {unit}{kept}".rstrip()


def _doubts(found: BenchCalibration) -> Iterator[str]:
    made = found.fit.calibration
    for figure, errors in made.errors.items():
        if errors.left_out is None:
            continue
        if errors.before is not None and errors.left_out > errors.before:
            yield (
                f"{FIGURE_NAMES[figure]}: off by {errors.left_out:.0%} where loads are left out, and by "
                f"{errors.before:.0%} before: the calibration makes it no better"
            )
    if all(errors.left_out is None for errors in made.errors.values()):
        yield "with one load alone nothing is left to test the constants on: measure several (--concurrency 1,4,16)"
    if found.limited:
        yield (
            "the load generator may have been the limit, and its delays are then part of the constants: "
            f"{'; '.join(found.limited)}"
        )
    yield from (f"not used: {text}" for text in found.unfit)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
