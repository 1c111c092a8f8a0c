"""Result of a search as text, and as one self-contained HTML file: advice, front and all trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.bench.page import render_page
from pipeline.bench.tune.objective import maximized
from pipeline.bench.tune.report import TrialReport, TuneReport
from pipeline.bench.tune.search_space import Value
from pipeline.charts import has_matplotlib, inline_svg, svg_text
from pipeline.extras import install_line

_FOUND, _SOFT = "#0072b2", "#6b7785"
_PARTS = {"build": "building", "serve": "starting", "measure": "measuring"}


def write_tune_page(report: TuneReport, path: Path) -> None:
    """Write a search as an HTML page; the file is replaced."""
    path.write_text(tune_page(report), encoding="utf-8")


def tune_page(report: TuneReport) -> str:
    """Render the page of a search."""
    picture, no_picture = "", ""
    if not any(trial.loads for trial in report.trials):
        no_picture = "No trial was measured."
    elif has_matplotlib():
        alt = "tokens a second against the latency of whole requests, p95; the table below has the figures"
        colors = {_FOUND: "var(--p50)", _SOFT: "var(--soft)"}
        picture = svg_text(inline_svg(lambda: _draw(report), "front", alt, colors=colors))
    else:
        no_picture = f"A chart needs matplotlib: {install_line('bench')}"
    heads = (
        "trial",
        "changes",
        *report.objectives,
        "load",
        "TTFT p95, ms",
        "ITL p95, ms",
        "tokens/s",
        "outcome",
    )
    rows = [
        (
            trial.number in report.front,
            (
                str(trial.number),
                change_text(trial),
                *figure_cells(report, trial),
                trial.reason or missed_text(trial) or trial.outcome,
                _figure(sum(trial.seconds.values()) or None),
            ),
        )
        for trial in ranked(report)
    ]
    return render_page(
        "tune.html.j2",
        report=report,
        lines=list(report_lines(report)),
        picture=picture,
        no_picture=no_picture,
        heads=(*heads, "s"),
        rows=rows,
        tried={key: ", ".join(map(value_text, values)) for key, values in report.keys.items()},
    )


def report_lines(report: TuneReport) -> Iterator[str]:
    """Yield lines with the costs, the advice and the paths of all files."""
    parts = ", ".join(f"{value:.0f} s {_PARTS[name]}" for name, value in report.seconds.items())
    counts = {
        name: sum(trial.outcome == name for trial in report.trials)
        for name in ("refused", "stopped", "failed")
    }
    others = "".join(f", {count} {name}" for name, count in counts.items() if count)
    yield (
        f"{len(report.trials)} trials{others}; {parts or 'nothing was measured'}; engines built: {report.engines}"
    )
    advice = report.recommendation
    match advice.verdict:
        case "tuned":
            yield f"recommended: {' '.join(advice.changes) or 'the recipe as it is'}: {advice.reason}"
        case "keep":
            yield f"keep what you have: {advice.reason}"
        case _:
            yield f"no advice yet: {advice.reason}"
    yield f"all trials: {report.folder}/report.json   page: {report.folder}/report.html"
    if report.tuned_recipe:
        yield f"wrote {report.tuned_recipe}"
        yield f"next: pipeline build {report.tuned_recipe}"


def ranked(report: TuneReport) -> list[TrialReport]:
    """Sort trials: the best first, then those that missed the SLO, then those without figures."""
    name = report.objectives[0]
    sign = -1.0 if maximized(name) else 1.0
    return sorted(
        report.trials,
        key=lambda trial: (
            not trial.values,
            bool(missed_text(trial)),
            sign * trial.values.get(name, 0.0),
            trial.number,
        ),
    )


def figure_cells(report: TuneReport, trial: TrialReport) -> tuple[str, ...]:
    """Cells of a table: the objectives, the load that they belong to, and its latencies and tokens."""
    at = trial.decisive
    known = (None,) * 3 if at is None else (at.ttft_p95_ms, at.itl_p95_ms, at.output_tokens_per_s)
    return (
        *(_figure(trial.values.get(name)) for name in report.objectives),
        trial.load,
        *map(_figure, known),
    )


def change_text(trial: TrialReport) -> str:
    """Changes of a trial for people."""
    return " ".join(trial.changes) or "the recipe as it is"


def missed_text(trial: TrialReport) -> str:
    """Targets of the SLO that a trial missed, and by how much; empty if it met all."""
    return ", ".join(f"{name} +{by:.0%}" for name, by in trial.violations.items() if by > 0)


def value_text(value: Value) -> str:
    """Value of a key for people."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _draw(report: TuneReport) -> Any:
    """Draw each load of each trial as a point; those on the front are joined and carry the number of their trial."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="whole requests, p95, ms", ylabel="output tokens/s")
    axes.grid(visible=True, alpha=0.3)
    every = [(load.total_p95_ms, load.output_tokens_per_s) for trial in report.trials for load in trial.loads]
    axes.scatter(*_columns(every), s=14, color=_SOFT, linewidths=0)
    best = [
        (trial.number, at)
        for trial in report.trials
        if trial.number in report.front and (at := trial.decisive)
    ]
    points = sorted((at.total_p95_ms or 0.0, at.output_tokens_per_s, number) for number, at in best)
    axes.plot(*_columns([point[:2] for point in points]), color=_FOUND, linewidth=1)
    axes.scatter(*_columns([point[:2] for point in points]), s=36, color=_FOUND, linewidths=0)
    for x, y, number in points:
        axes.annotate(f"trial {number}", (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set_ylim(bottom=0)
    return figure


def _columns(points: Sequence[tuple[float | None, float]]) -> tuple[list[float], list[float]]:
    known = [(x, y) for x, y in points if x is not None]
    return [x for x, _ in known], [y for _, y in known]
