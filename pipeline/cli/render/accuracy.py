"""`pipeline plan --accuracy`: the models of memory and speed against published measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from pipeline.plan.memory.accuracy import Accuracy, capacity_accuracy, load_log_accuracy
from pipeline.plan.performance.tables_accuracy import speed_json, speed_lines


def accuracy_page(*, as_json: bool) -> str:
    """Memory: every point with its error, then median and worst. Speed: the figures held aside, set by set."""
    parts = {"capacity": capacity_accuracy(), "load_log": load_log_accuracy()}
    if as_json:
        rows = {name: _row(part) for name, part in parts.items()}
        return json.dumps({**rows, "speed": speed_json()}, indent=2)
    return "\n".join([*_lines(parts["capacity"], parts["load_log"]), "", *speed_lines()])


def _row(part: Accuracy) -> dict[str, object]:
    figures = [{**asdict(figure), "error": figure.error} for figure in part.figures]
    return {"median": part.median, "worst": part.worst, "figures": figures}


def _lines(capacity: Accuracy, load_log: Accuracy) -> Iterator[str]:
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


def _table(part: Accuracy, what: str) -> Iterator[str]:
    width = max(len(what), *(len(figure.what) for figure in part.figures))
    yield f"  {what:<{width}}  measured  computed   error"
    for figure in part.figures:
        yield f"  {figure.what:<{width}}  {figure.measured:>8g}  {figure.computed:>8.0f}  {figure.error:>+6.1%}"
