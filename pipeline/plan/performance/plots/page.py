"""The front as one HTML file that needs nothing else: a drawing (SVG) and a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape

from pipeline.plan.performance.compare import Comparison, Place
from pipeline.plan.performance.plots.axes import Axis
from pipeline.plan.performance.tables import number
from pipeline.plan.performance.tables_compare import measure_label, notes, place_label

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 960, 540, 80, 60, 20
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
svg { width: 100%; height: auto; } text { font: 12px system-ui, sans-serif; fill: currentColor; }
.grid { stroke: #8886; } .load { fill: #8a93a0; } .front { fill: #1668b8; } .edge { stroke: #1668b8; fill: none; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid #8884; }
@media (prefers-color-scheme: dark) { body { color: #e6e9ee; background: #14171b; } .front { fill: #6db3ff; }
  .edge { stroke: #6db3ff; } }
"""


def front_page(found: Comparison) -> str:
    """The file. Each load is a circle, with its deployment and figures in a tooltip."""
    return "\n".join(_lines(found))


def _lines(found: Comparison) -> Iterator[str]:
    title = escape(f"{found.recipe.name}: time between tokens against what they take")
    work = found.question.work
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield f"<p>Prompts of {work.prompt_tokens} and answers of {work.output_tokens} tokens. Lower left is better.</p>"
    if found.places:
        yield from _drawing(found)
        yield from _table(found)
    else:
        yield "<p>Nothing serves a single request within the SLO.</p>"
    yield from (f"<p>{escape(line.strip())}</p>" for line in notes(found, sys.maxsize))
    yield "</body>\n</html>"


def _drawing(found: Comparison) -> Iterator[str]:
    across = Axis.over([place.load.itl_ms for place in found.places])
    upwards = Axis.over([place.spent for place in found.places])

    def x(value: float) -> float:
        return round(_LEFT + across.place(value) * (_WIDTH - _LEFT - _EDGE), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - upwards.place(value) * (_HEIGHT - _BOTTOM - _EDGE), 1)

    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Pareto front">'
    for mark in across.marks():
        yield f'<line class="grid" x1="{x(mark)}" x2="{x(mark)}" y1="{_EDGE}" y2="{_HEIGHT - _BOTTOM}"/>'
        yield f'<text x="{x(mark)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number(mark)}</text>'
    for mark in upwards.marks():
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _EDGE}" y1="{y(mark)}" y2="{y(mark)}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(mark) + 4}" text-anchor="end">{number(mark)}</text>'
    yield f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 16}" text-anchor="end">ms between tokens of one user</text>'
    yield f'<text x="{_LEFT}" y="14">{escape(measure_label(found))}</text>'
    edge = " ".join(f"{x(place.load.itl_ms)},{y(place.spent)}" for place in found.front)
    yield f'<polyline class="edge" points="{edge}"/>'
    best = {id(place) for place in found.front}
    for place in sorted(found.places, key=lambda one: id(one) in best):
        kind, radius = ("front", 5) if id(place) in best else ("load", 3)
        yield (
            f'<circle class="{kind}" cx="{x(place.load.itl_ms)}" cy="{y(place.spent)}" r="{radius}">'
            f"<title>{escape(_tip(place))}</title></circle>"
        )
    yield "</svg>"


def _tip(place: Place) -> str:
    load = place.load
    return (
        f"{place_label(place)}: {number(load.itl_ms)} ms between tokens, first token {number(load.ttft_ms)} ms (p95),"
        f" {number(load.tokens_per_s)} tokens/s, {number(place.spent)}"
    )


def _table(found: Comparison) -> Iterator[str]:
    heads = ("on the front", "ms between tokens", "first token p95, ms", "tokens/s", measure_label(found))
    yield "<table>\n<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    for place in found.front:
        load = place.load
        cells = (
            place_label(place),
            *map(number, (load.itl_ms, load.ttft_ms, load.tokens_per_s, place.spent)),
        )
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"
