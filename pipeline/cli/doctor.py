"""`pipeline doctor`: what this machine can do, and which recipes are runnable here."""

from __future__ import annotations

import sys

import click

from pipeline.cli.options import Verb, complete_recipe, open_store
from pipeline.cli.output import print_json


@click.command(name="doctor", cls=Verb)
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1, shell_complete=complete_recipe)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for drivers, daemons and the hub to answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(recipes: tuple[str, ...], timeout_s: float, as_json: bool) -> None:
    """Say what this machine has, and which recipes (all packaged ones if none is named) can be built and deployed here.

    Exit code 0 if all that are named are runnable, or any if none is named; 2 otherwise. Nothing is installed, pulled
    or started, and a probe that hangs is given up after --timeout-s.

    \b
    pipeline doctor
    pipeline doctor llama-3.1-8b-fp8 my.yaml
    pipeline doctor --json
    """
    from pipeline.cli.render.doctor import print_report
    from pipeline.doctor import examine

    report = examine(recipes, open_store(), deadline_s=timeout_s)
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report)
    sys.exit(report.exit_code)
