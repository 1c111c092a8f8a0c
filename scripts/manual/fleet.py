"""The picture of a simulated day, drawn from the figures that `python -m benchmarks fleet` has kept."""

from __future__ import annotations

import json

from benchmarks.__main__ import RESULTS
from benchmarks.fleet import day_chart


def day() -> str:
    """HTML: the picture as an inline SVG, which follows the colors of the page; empty without matplotlib."""
    return day_chart(json.loads(RESULTS.read_text(encoding="utf-8"))["fleet"]["result"])
