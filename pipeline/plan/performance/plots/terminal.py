"""The front with characters: `.` a load within the SLO, letters those on the front."""

from __future__ import annotations

import string
from collections.abc import Iterator

from pipeline.plan.performance.compare import Comparison
from pipeline.plan.performance.plots.axes import Axis
from pipeline.plan.performance.tables import number
from pipeline.plan.performance.tables_compare import measure_label, place_label

_ROWS = 18
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


def front_lines(found: Comparison, width: int) -> Iterator[str]:
    """A plot of so many columns, and what its letters are; nothing where nothing serves."""
    if not found.places:
        return
    across = Axis.over([place.load.itl_ms for place in found.places])
    upwards = Axis.over([place.spent for place in found.places])
    columns = max(20, min(width, 110) - 12)
    cells = [[" "] * columns for _ in range(_ROWS)]

    def put(itl_ms: float, spent: float, mark: str) -> None:
        row = _ROWS - 1 - round(upwards.place(spent) * (_ROWS - 1))
        cells[row][round(across.place(itl_ms) * (columns - 1))] = mark

    for place in found.places:
        put(place.load.itl_ms, place.spent, ".")
    marked = list(zip(_LETTERS, found.front, strict=False))
    for letter, place in reversed(marked):
        put(place.load.itl_ms, place.spent, letter)
    labels = {_ROWS - 1 - round(upwards.place(mark) * (_ROWS - 1)): number(mark) for mark in upwards.marks()}
    yield f"  {measure_label(found)}"
    for index, row in enumerate(cells):
        yield f"  {labels.get(index, ''):>7} |{''.join(row).rstrip()}"
    yield f"  {'':>7} +{'-' * columns}"
    yield f"  {'':>9}{_scale(across, columns)}"
    yield f"  {'ms between tokens of one user':>{columns + 9}}"
    for letter, place in marked:
        yield (
            f"  {letter}  {place_label(place)}: {number(place.load.itl_ms)} ms,"
            f" {number(place.load.tokens_per_s)} tokens/s, {number(place.spent)}"
        )


def _scale(axis: Axis, columns: int) -> str:
    line = [" "] * columns
    free = 0
    for mark in axis.marks():
        text, start = number(mark), round(axis.place(mark) * (columns - 1))
        if free <= start <= columns - len(text):
            line[start : start + len(text)] = text
            free = start + len(text) + 1
    return "".join(line).rstrip()
