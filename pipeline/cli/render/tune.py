"""Output of `pipeline tune`: a line for each trial with the best so far, the table, and the advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape as plain
from rich.table import Table

from pipeline.bench.tune.objective import UNITS, TrialRecord
from pipeline.bench.tune.page import change_text, figure_cells, missed_text, ranked, value_text
from pipeline.bench.tune.report import TuneReport, best_of
from pipeline.bench.tune.run import FIRST_SECONDS, SearchPlan
from pipeline.bench.tune.search_space import SearchSpace
from pipeline.bench.tune.settings import Objective

_SERVE_S = 15.0  # to start and stop a small model; large ones take minutes


class TrialLines:
    """Prints each trial as it begins and ends, with the best so far."""

    def __init__(
        self, space: SearchSpace, objectives: Sequence[Objective], say: Callable[[str], None]
    ) -> None:
        self._space, self._objectives, self._say = space, objectives, say
        self._records: dict[int, TrialRecord] = {}

    def begin(self, records: Sequence[TrialRecord]) -> None:
        """Print how far an earlier run came."""
        self._records = {record.number: record for record in records}
        there = sum(record.outcome != "planned" for record in records)
        if there:
            self._say(f"going on after {there} trials{self._best()}")

    def show(self, trial: TrialRecord) -> None:
        """Print a trial that begins (`planned`) or ended."""
        changes = " ".join(self._space.overrides(trial.settings)) or "the recipe as it is"
        if trial.outcome == "planned":
            self._say(f"trial {trial.number}: {changes}")
            return
        self._records[trial.number] = trial
        took = f"{sum(trial.seconds.values()):.0f} s" if trial.seconds else ""
        figures = " ".join(f"{value:,.4g} {UNITS[name]}" for name, value in trial.values.items())
        missed = [f"{name} missed by {by:.0%}" for name, by in trial.violations.items() if by > 0]
        parts = [
            figures,
            trial.load and f"at {trial.load}",
            *missed,
            trial.reason.splitlines()[0] if trial.reason else "",
        ]
        text = ", ".join(part for part in (*parts, took) if part)
        self._say(f"trial {trial.number}: {trial.outcome}: {text}{self._best()}")

    def _best(self) -> str:
        best = best_of(list(self._records.values()), self._objectives)
        if best is None:
            return "; none within the SLO yet"
        name = self._objectives[0]
        return f"; best so far: trial {best.number}, {best.values[name]:,.4g} {UNITS[name]}"


def space_table(space: SearchSpace) -> Table:
    """Make the table of keys that are tried, and those that are not."""
    table = Table("key", "values", "engine", "why", box=SIMPLE)
    for dimension in space.dimensions:
        values = " ".join(
            f"[{value_text(value)}]" if value == dimension.own else value_text(value)
            for value in dimension.values
        )
        table.add_row(
            dimension.key, plain(values), "another" if dimension.compiled else "same", dimension.reason
        )
    by_reason: dict[str, list[str]] = {}
    for key, reason in space.left_out.items():
        by_reason.setdefault(reason, []).append(key)
    left_out = [f"not tried: {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
    whole = f"{space.size:,} combinations; the recipe's own values stand in brackets"
    table.caption, table.caption_justify = plain("\n".join([whole, *left_out])), "left"
    return table


def space_json(space: SearchSpace) -> dict[str, Any]:
    """The same for JSON."""
    tried = [
        {
            "key": dimension.key,
            "values": dimension.values,
            "own": dimension.own,
            "another_engine": dimension.compiled,
            "reason": dimension.reason,
        }
        for dimension in space.dimensions
    ]
    return {"keys": tried, "combinations": space.size, "left_out": dict(space.left_out)}


def plan_lines(plan: SearchPlan) -> dict[str, Any]:
    """List what a search will do, and about how long it takes."""
    space, options, load = plan.space, plan.options, plan.load
    trials, rounds = min(len(options.sweep) or options.trials, space.size), 2 * plan.rounds
    # As many seconds as are known: answers under way at the end, and loads by count, take longer.
    load_s = (load.period_s or 0.0) + load.uncounted_s + FIRST_SECONDS
    loads = 1 if plan.objectives[0] == "latency" else len(options.loads)
    least, most = load_s + _SERVE_S, loads * load_s + _SERVE_S
    measured, compiled = (
        trials + rounds,
        [dimension.key for dimension in space.dimensions if dimension.compiled],
    )
    return {
        "trials": trials,
        "rounds": f"{rounds} at the end",
        "keys": ", ".join(dimension.key for dimension in space.dimensions),
        "objective": " and ".join(f"{objective} ({UNITS[objective]})" for objective in plan.objectives),
        "loads": ", ".join(str(level) for level in options.loads),
        "prompts": "words at random" if load.file is None else str(load.file),
        "engines": f"other ones for {', '.join(compiled)}" if compiled else "none is built anew",
        "time": f"{measured * least / 60:.0f} to {measured * most / 60:.0f} minutes, and what building takes",
    }


def report_table(report: TuneReport) -> Table:
    """Make the table of all trials, the best first, then those without figures."""
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
    for trial in ranked(report):
        chosen = trial.number == report.recommendation.trial and report.recommendation.verdict == "tuned"
        table.add_row(
            f"{trial.number}{'*' if trial.number in report.front else ''}",
            plain(change_text(trial)),
            *figure_cells(report, trial),
            trial.outcome if trial.outcome != "measured" else missed_text(trial) or "within the SLO",
            style="bold" if chosen else None,
        )
    table.caption = "* on the front: no other trial is better in all of it"
    return table
