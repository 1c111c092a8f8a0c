"""The front as a PNG, drawn by matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
from collections.abc import Sequence

from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.plan.performance.compare import Comparison, Place
from pipeline.plan.performance.tables_compare import measure_label, place_label


def front_picture(found: Comparison) -> bytes:
    """The file. UserError where matplotlib is not installed, or where there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"a PNG needs matplotlib: {install_line('plot')}, or write .html") from None
    if not found.places:
        raise UserError("nothing serves a single request within the SLO, so there is nothing to draw")
    figure = Figure(figsize=(10, 6), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.loglog(*_points(found.places), ".", color="0.6")
    axes.loglog(*_points(found.front), "o-", color="tab:blue")
    for place in found.front:
        axes.annotate(
            place_label(place),
            (place.load.itl_ms, place.spent),
            textcoords="offset points",
            xytext=(6, 6),
            fontsize=7,
        )
    axes.set(title=found.recipe.name, xlabel="ms between tokens of one user", ylabel=measure_label(found))
    axes.grid(visible=True, which="both", alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _points(places: Sequence[Place]) -> tuple[list[float], list[float]]:
    return [place.load.itl_ms for place in places], [place.spent for place in places]
