"""`pipeline plan`: what a build would make, without making it."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.options import allow_option, recipe_argument, store_option


@click.command(name="plan")
@recipe_argument
@store_option
@click.option("--until", default="package", show_default=True, metavar="STEP", help="Plan up to this step.")
@allow_option
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every key with all that it is made from.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    until: str,
    allowed: frozenset[str],
    offline: bool,
    as_json: bool,
) -> None:
    """Print the steps that `pipeline build RECIPE` would run, and which of them the store has already.

    \b
    pipeline plan tiny-cpu
    pipeline plan tiny-cpu --set quantization.format=int4_awq --json
    """
    from pipeline.cli.tables import plan_json, plan_table
    from pipeline.recipe import load_recipe
    from pipeline.stages import prepare
    from pipeline.store import Store

    shelf = Store.at(store)
    prepared = prepare(load_recipe(recipe, overrides), shelf, offline=offline, allowed=allowed)
    click.echo((plan_json if as_json else plan_table)(prepared.plan, shelf, until, prepared.findings))
