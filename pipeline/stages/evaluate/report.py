"""report.json and report.html: the verdict, the figures, the spread of the KL divergence, and the worst
positions.

The page is one file: its style and its picture are inside, and it needs no script and no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pipeline.stages.evaluate.metrics import Histogram, Metrics
from pipeline.stages.evaluate.verdict import Verdict

_WIDTH, _HEIGHT = 760, 200  # of the picture, in its own units


def write_report(metrics: Sequence[Metrics], verdict: Verdict, directory: Path) -> None:
    """Write both files into `directory`, which is made if need be; the files that the runtime loads come first.

    Nothing is written where the report says the same already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    content = {"verdict": verdict.to_json(), "metrics": [one.to_json() for one in metrics]}
    text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    page, data = directory / "report.html", directory / "report.json"
    if page.is_file() and data.is_file() and data.read_text(encoding="utf-8") == text:
        return
    page.write_text(render(metrics, verdict), encoding="utf-8")
    data.write_text(text, encoding="utf-8")


def render(metrics: Sequence[Metrics], verdict: Verdict) -> str:
    """The page."""
    import jinja2

    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        exports=metrics, verdict=verdict, bars=bars, width=_WIDTH, height=_HEIGHT
    )


def bars(histogram: Histogram) -> list[dict[str, float | int | str]]:
    """One bar a bin, in the units of the picture: x, y, width, height, and what it stands for."""
    top = max((*histogram.counts, 1))
    step = _WIDTH / max(len(histogram.counts), 1)
    drawn: list[dict[str, float | int | str]] = []
    for index, count in enumerate(histogram.counts):
        tall = _HEIGHT * count / top
        low, high = histogram.edges[index], histogram.edges[index + 1]
        drawn.append(
            {
                "x": round(index * step + 1, 2),
                "y": round(_HEIGHT - tall, 2),
                "width": round(step - 2, 2),
                "height": round(tall, 2),
                "middle": round((index + 0.5) * step, 2),
                "label": f"{low:.0e}" if index % 4 == 0 else "",
                "title": f"{count} positions between {low:.1e} and {high:.1e} nats",
            }
        )
    return drawn
