"""What `pipeline tune` prints: a line for each trial with the best so far, the table, the advice, and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape as plain
from rich.table import Table

from pipeline.bench.run import BenchOptions
from pipeline.charts import has_matplotlib, inline_svg, svg_text
from pipeline.extras import install_line
from pipeline.bench.tune.objective import UNITS, Objective, maximized
from pipeline.bench.tune.report import TrialFigures, TrialReport, TuneReport, best_of
from pipeline.bench.tune.search import SearchOptions
from pipeline.bench.tune.search_space import SearchSpace, Value
from pipeline.bench.tune.study import TrialRecord

_SERVE_S = 15.0  # to start and stop a small model; large ones take minutes
_STYLE = """
:root { color-scheme: light dark; --found: #0072b2; --soft: #6b7785; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; }
svg { width: 100%; height: auto; } .scrolls { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; text-align: right; }
td:nth-child(2), th:nth-child(2) { text-align: left; } tr { border-bottom: 1px solid #8884; }
.found { font-weight: 600; }
@media (prefers-color-scheme: dark) { :root { --found: #56b4e9; --soft: #9aa7b5; } }
"""
_FOUND, _SOFT = "#0072b2", "#6b7785"


class TrialLines:
    """Tells of each trial as it begins and ends, with the best so far."""

    def __init__(
        self, space: SearchSpace, objectives: Sequence[Objective], say: Callable[[str], None]
    ) -> None:
        self._space, self._objectives, self._say = space, objectives, say
        self._records: dict[int, TrialRecord] = {}

    def begin(self, records: Sequence[TrialRecord]) -> None:
        """Tell what is there of an earlier run."""
        self._records = {one.number: one for one in records}
        there = sum(one.outcome != "planned" for one in records)
        if there:
            self._say(f"going on after {there} trials{self._best()}")

    def show(self, trial: TrialRecord) -> None:
        """Tell of a trial that begins (`planned`) or ended."""
        changes = " ".join(self._space.overrides(trial.settings)) or "the recipe as it is"
        if trial.outcome == "planned":
            self._say(f"trial {trial.number}: {changes}")
            return
        self._records[trial.number] = trial
        took = f"{sum(trial.seconds.values()):.0f} s" if trial.seconds else ""
        figures = " ".join(
            f"{value:,.4g} {UNITS[name]}" for name, value in zip(self._objectives, trial.values, strict=False)
        )
        missed = [f"{name} missed by {by:.0%}" for name, by in trial.violations.items() if by > 0]
        said = [
            figures,
            trial.load and f"at {trial.load}",
            *missed,
            trial.reason.splitlines()[0] if trial.reason else "",
        ]
        parts = ", ".join(part for part in (*said, took) if part)
        self._say(f"trial {trial.number}: {trial.outcome}: {parts}{self._best()}")

    def _best(self) -> str:
        best = best_of(list(self._records.values()), self._objectives)
        if best is None:
            return "; none within the SLO yet"
        name = self._objectives[0]
        return f"; best so far: trial {best.number}, {best.values[0]:,.4g} {UNITS[name]}"


def space_table(space: SearchSpace) -> Table:
    """The keys that are tried, and those that are not."""
    table = Table("key", "values", "engine", "why", box=SIMPLE)
    for one in space.dimensions:
        values = " ".join(f"[{_word(value)}]" if value == one.own else _word(value) for value in one.values)
        table.add_row(one.key, plain(values), "another" if one.compiled else "same", one.reason)
    by_reason: dict[str, list[str]] = {}
    for key, reason in space.left_out.items():
        by_reason.setdefault(reason, []).append(key)
    left_out = [f"not tried: {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
    whole = f"{space.size:,} combinations; the recipe's own values stand in brackets"
    table.caption, table.caption_justify = plain("\n".join([whole, *left_out])), "left"
    return table


def plan_lines(
    space: SearchSpace,
    options: SearchOptions,
    bench: BenchOptions,
    rounds: int,
    objectives: Sequence[Objective],
    first_seconds: float,
) -> dict[str, Any]:
    """What a search will do, and about how long it takes."""
    trials = min(len(options.sweep) or options.trials, space.size)
    # As many seconds as are known: answers under way at the end, and loads by count, take longer.
    load_s = (bench.seconds or 0.0) + bench.warm_up_s + first_seconds
    loads = 1 if objectives[0] == "latency" else len(options.loads)
    least, most = load_s + _SERVE_S, loads * load_s + _SERVE_S
    measured = trials + rounds
    return {
        "trials": trials,
        "rounds": f"{rounds} at the end",
        "keys": ", ".join(one.key for one in space.dimensions),
        "objective": " and ".join(f"{one} ({UNITS[one]})" for one in objectives),
        "loads": ", ".join(str(load) for load in options.loads),
        "prompts": "words at random" if bench.file is None else str(bench.file),
        "engines": "other ones for " + ", ".join(one.key for one in space.dimensions if one.compiled)
        if any(one.compiled for one in space.dimensions)
        else "none is built anew",
        "time": f"{measured * least / 60:.0f} to {measured * most / 60:.0f} minutes, and what building takes",
    }


def report_table(report: TuneReport) -> Table:
    """All trials, the best first, then those without figures."""
    table = Table(
        "trial",
        "changes",
        *report.objectives,
        "load",
        "TTFT p95",
        "ITL p95",
        "tokens/s",
        "outcome",
        box=SIMPLE,
    )
    for one in _sorted(report):
        chosen = one.number == report.recommendation.trial and report.recommendation.verdict == "tuned"
        table.add_row(
            f"{one.number}{'*' if one.number in report.front else ''}",
            plain(" ".join(one.changes) or "the recipe as it is"),
            *_figures(report, one),
            one.outcome if one.outcome != "measured" else _missed(one) or "within the SLO",
            style="bold" if chosen else None,
        )
    table.caption = "* on the front: no other trial is better in all of it"
    return table


def report_lines(report: TuneReport) -> Iterator[str]:
    """Costs, the advice and where everything lies."""
    parts = ", ".join(f"{value:.0f} s {_PARTS[name]}" for name, value in report.seconds.items())
    counts = {
        name: sum(one.outcome == name for one in report.trials) for name in ("refused", "stopped", "failed")
    }
    said = "".join(f", {count} {name}" for name, count in counts.items() if count)
    yield f"{len(report.trials)} trials{said}; {parts or 'nothing was measured'}; engines built: {report.engines}"
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


_PARTS = {"build": "building", "serve": "starting", "measure": "measuring"}


def figures_at(one: TrialReport) -> TrialFigures | None:
    """The figures of the load that a trial's values are of."""
    return next((load for load in one.loads if load.load == one.load), None)


def _figures(report: TuneReport, one: TrialReport) -> tuple[str, ...]:
    """Cells of a table: the objectives, the load that they are of, and its latencies and tokens."""
    at = figures_at(one)
    known = (None,) * 3 if at is None else (at.ttft_p95_ms, at.itl_p95_ms, at.output_tokens_per_s)
    return (*(_figure(one.values.get(name)) for name in report.objectives), one.load, *map(_figure, known))


def _sorted(report: TuneReport) -> list[TrialReport]:
    name: Any = report.objectives[0]
    sign = -1.0 if maximized(name) else 1.0
    return sorted(
        report.trials,
        key=lambda one: (not one.values, bool(_missed(one)), sign * one.values.get(name, 0.0), one.number),
    )


def _missed(one: TrialReport) -> str:
    return ", ".join(f"{name} +{by:.0%}" for name, by in one.violations.items() if by > 0)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _word(value: Value) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# The page


def write_tune_page(report: TuneReport, path: Path) -> None:
    """Write the search as one HTML file that loads nothing: the advice, the front, all trials."""
    path.write_text("\n".join(_page(report)) + "\n", encoding="utf-8")


def _page(report: TuneReport) -> Iterator[str]:
    title = escape(f"{report.recipe}: tuned for {' and '.join(report.objectives)}")
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in report_lines(report))
    slo = ", ".join(f"{name} {value:g}" for name, value in report.slo.items()) or "none"
    yield f"<p>SLO: {escape(slo)}. {escape(report.made)}, {escape(str(report.machine.get('system', '')))}.</p>"
    if not any(one.loads for one in report.trials):
        yield "<p>No trial was measured.</p>"
    elif has_matplotlib():
        alt = "tokens a second against the latency of whole requests, p95; the table below has the figures"
        colors = {_FOUND: "var(--found)", _SOFT: "var(--soft)"}
        yield svg_text(inline_svg(lambda: _draw(report), "front", alt, colors=colors))
    else:
        yield f"<p>A chart needs matplotlib: {escape(install_line('bench'))}</p>"
    yield from _table(report)
    yield "<h2>What was tried</h2>\n<ul>"
    for key, values in report.keys.items():
        shown = ", ".join(map(_word, values))
        yield f"<li><code>{escape(key)}</code>: {escape(shown)}; {escape(report.reasons[key])}</li>"
    yield "</ul>\n</body>\n</html>"


def _draw(report: TuneReport) -> Any:
    """Each load of each trial as a point; those on the front are joined and carry the number of their trial."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="whole requests, p95, ms", ylabel="output tokens/s")
    axes.grid(visible=True, alpha=0.3)
    every = [(load.total_p95_ms, load.output_tokens_per_s) for one in report.trials for load in one.loads]
    axes.scatter(*_columns(every), s=14, color=_SOFT, linewidths=0)
    best = [
        (one.number, at) for one in report.trials if one.number in report.front and (at := figures_at(one))
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


def _table(report: TuneReport) -> Iterator[str]:
    heads = (
        "trial",
        "changes",
        *report.objectives,
        "load",
        "TTFT p95, ms",
        "ITL p95, ms",
        "tokens/s",
        "outcome",
        "s",
    )
    yield (
        '<div class="scrolls"><table>\n<tr>' + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    )
    for one in _sorted(report):
        cells = (
            str(one.number),
            " ".join(one.changes) or "the recipe as it is",
            *_figures(report, one),
            one.reason or _missed(one) or one.outcome,
            _figure(sum(one.seconds.values()) or None),
        )
        marked = ' class="found"' if one.number in report.front else ""
        yield f"<tr{marked}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"
