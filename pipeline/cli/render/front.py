"""The Pareto front of compared deployments: drawn with characters, as a PNG, or as one HTML page.

To the right are slower tokens, upwards is more that a million of them take; both axes are logarithmic, and lower left
is best. matplotlib (the extra `plot`) draws both; where it is missing, the page holds the drawing of the terminal.
"""

from __future__ import annotations

import io
import math
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from pipeline.charts import SVG, has_matplotlib, inline_svg, svg_text
from pipeline.cli.render.compared_options import measure_label, notes, place_label
from pipeline.cli.render.speed import number
from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.plan.performance.compare import Comparison, FrontPoint

_ROWS = 18  # of the drawing
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class Axis:
    """Logarithmic axis between two positive values, with a little room at the ends."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """Make an axis that shows all values."""
        low, high = min(values), max(values)
        room = max((high / low) ** 0.05, 1.1)
        return cls(low / room, high * room)

    def place(self, value: float) -> float:
        """Place of a value: 0 at the low end, 1 at the high end."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def marks(self) -> tuple[float, ...]:
        """List 1, 2 and 5 times powers of ten between the ends.

        >>> Axis(3, 120).marks()
        (5.0, 10.0, 20.0, 50.0, 100.0)
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        marks = (step * 10.0**power for power in powers for step in (1, 2, 5))
        return tuple(float(f"{value:.6g}") for value in marks if self.low <= value <= self.high)


def front_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield a plot of so many columns, and its legend; nothing where nothing serves."""
    if not comparison.places:
        return
    across = Axis.over([place.load.itl_ms for place in comparison.places])
    upwards = Axis.over([place.spent for place in comparison.places])
    columns = max(20, min(width, 110) - 12)
    cells = [[" "] * columns for _ in range(_ROWS)]

    def put(itl_ms: float, spent: float, mark: str) -> None:
        row = _ROWS - 1 - round(upwards.place(spent) * (_ROWS - 1))
        cells[row][round(across.place(itl_ms) * (columns - 1))] = mark

    for place in comparison.places:
        put(place.load.itl_ms, place.spent, ".")
    marked = list(zip(_LETTERS, comparison.front, strict=False))
    for letter, place in reversed(marked):
        put(place.load.itl_ms, place.spent, letter)
    labels = {_ROWS - 1 - round(upwards.place(mark) * (_ROWS - 1)): number(mark) for mark in upwards.marks()}
    yield f"  {measure_label(comparison)}"
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


_MARKER_PT = 3.0  # half the width of a point on the front
# Where a label may lie around its point: offset in points of type, horizontal and vertical alignment.
_PLACES = (
    ((4, 4), "left", "bottom"),
    ((4, -4), "left", "top"),
    ((-4, -4), "right", "top"),
    ((-4, 4), "right", "bottom"),
)


def front_png(comparison: Comparison) -> bytes:
    """Draw the front of a comparison as a PNG.

    Raises:
        UserError: matplotlib is not installed, or nothing serves within the SLO.
    """
    require_matplotlib()
    if not comparison.places:
        raise UserError("nothing serves a single request within the SLO, so there is nothing to draw")
    file = io.BytesIO()
    draw(comparison).savefig(file, format="png")
    return file.getvalue()


def front_page(comparison: Comparison) -> str:
    """Write the front of a comparison as an HTML page that loads nothing else.

    Each load in the chart has its deployment and its figures in a tooltip.
    """
    from pipeline.bench.page import render_page

    heads = (
        "on the front",
        "ms between tokens",
        "first token p95, ms",
        "tokens/s",
        measure_label(comparison),
    )
    rows = (
        (
            place_label(candidate),
            *map(
                number,
                (candidate.load.itl_ms, candidate.load.ttft_ms, candidate.load.tokens_per_s, candidate.spent),
            ),
        )
        for candidate in comparison.front
    )
    drawn = has_matplotlib()
    return render_page(
        "front.html.j2",
        title=f"{comparison.recipe.name}: time between tokens against what they take",
        work=comparison.question.work,
        table=[heads, *rows] if comparison.places else [],
        chart=_svg(comparison) if drawn and comparison.places else "",
        characters="" if drawn else "\n".join(front_lines(comparison, 110)),
        no_chart=f"A chart needs matplotlib: {install_line('plot')}",
        notes=[line.strip() for line in notes(comparison, sys.maxsize)],
    )


def require_matplotlib() -> None:
    """Raises UserError, which names the extra to install, if matplotlib is missing."""
    if not has_matplotlib():
        raise UserError(f"a PNG needs matplotlib: {install_line('plot')}, or write .html")


def draw(comparison: Comparison) -> Any:
    """Draw all loads of a comparison, with its front by deployment, as a `matplotlib.figure.Figure`.

    Points on the front carry the number of requests at a time; a label that would overlap another is left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(10, 7), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set(
        title=f"{comparison.recipe.name}: requests at a time",
        xscale="log",
        yscale="log",
        xlabel="ms between tokens of one user",
        ylabel=measure_label(comparison),
    )
    axes.grid(visible=True, alpha=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.plot(*_points(comparison.front), color="0.5", linewidth=1, zorder=2)
    labels = list(dict.fromkeys(place.option.label for place in comparison.front))
    colors = {label: f"C{index % 10}" for index, label in enumerate(labels)}
    for label in labels:
        axes.plot([], [], "o", color=colors[label], label=label)
    axes.scatter(*_points(_others(comparison)), s=12, color="0.6", linewidths=0, gid="others", zorder=1)
    axes.scatter(
        *_points(comparison.front),
        s=(2 * _MARKER_PT) ** 2,
        c=[colors[place.option.label] for place in comparison.front],
        linewidths=0,
        gid="front",
        zorder=3,
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    _label_front(figure, axes, comparison.front)
    return figure


def _label_front(figure: Any, axes: Any, front: Sequence[FrontPoint]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # so that nothing moves any more
    size = _MARKER_PT * figure.dpi / 72
    centers = axes.transData.transform([(place.load.itl_ms, place.spent) for place in front])
    taken = [Bbox([(x - size, y - size), (x + size, y + size)]) for x, y in centers]
    for place in front:
        for offset, across, upwards in _PLACES:
            label = axes.annotate(
                str(place.load.batch),
                (place.load.itl_ms, place.spent),
                textcoords="offset points",
                xytext=offset,
                ha=across,
                va=upwards,
                fontsize=7,
            )
            box = label.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _svg(comparison: Comparison) -> str:
    """Draw the chart as an `<svg>` element, with a tooltip on each load."""
    alt = f"{measure_label(comparison)} against ms between tokens; the table below has the loads on the front"
    root = inline_svg(lambda: draw(comparison), "front", alt)
    for group, places in (("others", _others(comparison)), ("front", comparison.front)):
        drawn = root.find(f".//*[@id='front-{group}']")
        assert drawn is not None, "matplotlib writes a group for each gid"
        # A path that is drawn often is defined once, and used.
        points = list(drawn.iter(f"{{{SVG}}}use")) or list(drawn.iter(f"{{{SVG}}}path"))
        for point, place in zip(points, places, strict=True):
            ElementTree.SubElement(point, f"{{{SVG}}}title").text = _tip(place)
    return svg_text(root)


def _tip(place: FrontPoint) -> str:
    load = place.load
    return (
        f"{place_label(place)}: {number(load.itl_ms)} ms between tokens, first token {number(load.ttft_ms)} ms (p95),"
        f" {number(load.tokens_per_s)} tokens/s, {number(place.spent)}"
    )


def _others(comparison: Comparison) -> list[FrontPoint]:
    """List the loads that are not on the front."""
    best = {id(place) for place in comparison.front}
    return [place for place in comparison.places if id(place) not in best]


def _points(places: Sequence[FrontPoint]) -> tuple[list[float], list[float]]:
    return [place.load.itl_ms for place in places], [place.spent for place in places]
