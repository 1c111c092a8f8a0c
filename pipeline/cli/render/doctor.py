"""The doctor's report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pipeline.cli.output import print_rich

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.doctor import Obstacle, Report, Verdict

_MARKS = {"ok": "✓", "note": "·", "warning": "!", "missing": "✗", "unknown": "?"}
_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "missing": "red", "unknown": "magenta"}
_WAYS = {"build": "build", "local": "deploy", "docker": "docker"}
_FEW = 3  # recipes that are named; of more, their number


def print_report(report: Report) -> None:
    """Print the machine, then the recipes with the obstacles in their way."""
    print_rich(_machine(report), _recipes(report))
    _print_obstacles(report.recipes)
    runnable = sum(verdict.runnable for verdict in report.recipes)
    click.echo(
        f"{runnable} of {len(report.recipes)} recipes are runnable here; looked at in {report.seconds:.1f} s"
    )


def _machine(report: Report) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section in report.sections:
        table.add_row("", f"[bold]{section.title}[/bold]", "")
        for check in section.checks:
            mark = f"[{_STYLES[check.state]}]{_MARKS[check.state]}[/]"
            table.add_row(mark, _plain(check.subject), _plain(check.text))
            if check.fix:
                table.add_row("", "", f"[dim]→[/dim] {_plain(check.fix)}")
    return table


def _recipes(report: Report) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("RECIPE", "RUNTIME", "NEEDS", "BUILD", "DEPLOY HERE", "DEPLOY BY DOCKER", "RUNNABLE"):
        table.add_column(name)
    for verdict in report.recipes:
        ways = {way.name: way.possible for way in verdict.ways}
        cells = [_answer(ways.get(name)) for name in ("build", "local", "docker")]
        needs = f"{verdict.gpus} x {verdict.gpu}" if verdict.gpus else "CPU"
        table.add_row(
            _plain(verdict.recipe), verdict.runtime or "not valid", needs, *cells, _answer(verdict.runnable)
        )
    return table


def _answer(possible: bool | None) -> str:
    if possible is None:
        return "[dim]-[/dim]"
    return "[green]yes[/green]" if possible else "[red]no[/red]"


def _print_obstacles(verdicts: Sequence[Verdict]) -> None:
    """Print each obstacle once, with what would help and the recipes that it stops."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}  # (about, fix) -> "build: problem" -> recipes
    for verdict in verdicts:
        ways: dict[Obstacle, list[str]] = {}
        for way in verdict.ways:
            for obstacle in way.obstacles:
                ways.setdefault(obstacle, []).append(_WAYS[way.name])
        for obstacle, names in ways.items():
            fix = (
                obstacle.fix
                if len(verdicts) == 1
                else obstacle.fix.replace(f" {verdict.recipe} ", " RECIPE ")
            )
            lines = groups.setdefault((obstacle.rule or obstacle.subject, fix), {})
            lines.setdefault(f"{', '.join(names)}: {obstacle.problem}", []).append(verdict.recipe)
    for (about, fix), lines in groups.items():
        click.echo(f"{about}{f' → {fix}' if fix else ''}")
        for problem, recipes in lines.items():
            stopped = ", ".join(recipes) if len(recipes) <= _FEW else f"{len(recipes)} recipes"
            click.echo(f"    {stopped}: {problem}")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
