"""`pipeline plan`: know before you build."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pipeline.cli.options import allow_option, complete_recipe, set_option, store_option
from pipeline.cli.plan_compare import Speed, compare_page, speed_options
from pipeline.errors import UserError


@click.command(name="plan")
@click.argument("recipe", metavar="RECIPE", required=False, shell_complete=complete_recipe)
@set_option
@click.option("--gpu", metavar="NAME", help="As --set runtime.gpu=NAME, before all others: try another GPU.")
@store_option
@click.option("--until", default="package", show_default=True, metavar="STEP", help="Plan up to this step.")
@allow_option
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: every figure with its formula and its sources."
)
@click.option(
    "--accuracy",
    is_flag=True,
    help="Compare the models of memory and speed with published measurements; needs no RECIPE.",
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of what --json prints; needs no RECIPE.")
@speed_options
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    gpu: str | None,
    store: Path | None,
    until: str,
    allowed: frozenset[str],
    offline: bool,
    as_json: bool,
    accuracy: bool,
    schema: bool,
    speed: Speed,
) -> None:
    """Say what RECIPE comes to before anything is made: whether it fits into memory, what `pipeline build` would make,
    and what speaks against it. Nothing is downloaded but the config.json and the headers of models that are not known.

    Exit code 2 if it does not fit, or a build would be refused.

    \b
    pipeline plan llama-3.1-8b-fp8
    pipeline plan llama-3.3-70b-fp8 --gpu h200-sxm-141g --set runtime.tensor_parallel=2
    pipeline plan tiny-cpu --json
    pipeline plan llama-3.3-70b-fp8 --prompt-tokens 1000 --output-tokens 500 --acceptance 0.8 --price h100-sxm=2.5
    pipeline plan llama-3.3-70b-fp8 --compare --price h100-sxm=2.5 --price h200=3.5 --output front.html
    pipeline plan --accuracy
    """
    from pipeline.cli.render.accuracy import accuracy_page
    from pipeline.cli.render.bars import Look
    from pipeline.cli.render.comparison_json import schema_text as comparison_schema
    from pipeline.cli.render.plan import document, page
    from pipeline.prepare.report import make_report
    from pipeline.prepare.report_json import schema_text
    from pipeline.recipe import load_recipe
    from pipeline.store import Store

    if schema:
        click.echo(comparison_schema() if speed.compare else schema_text().rstrip("\n"))
        return
    if accuracy:
        click.echo(accuracy_page(as_json=as_json))
        return
    if recipe is None:
        raise UserError("name a RECIPE (pipeline recipes ls), or give --accuracy or --schema")
    if gpu is not None:
        overrides = (f"runtime.gpu={gpu}", *overrides)
    shelf, asked, look = Store.at(store), speed.asked(), Look.of_output()
    chosen = load_recipe(recipe, overrides)
    if speed.compare:
        click.echo(compare_page(chosen, shelf, speed, offline=offline, as_json=as_json, width=look.width))
        return
    outlook = make_report(chosen, shelf, offline=offline, allowed=allowed, workload=asked)
    if outlook.plan is not None and until not in outlook.plan:
        raise UserError(f"no step {until!r}; this build has {', '.join(step.name for step in outlook.plan)}")
    click.echo(document(outlook, shelf, until) if as_json else page(outlook, shelf, until, look))
    if outlook.refused:
        sys.exit(UserError.exit_code)
