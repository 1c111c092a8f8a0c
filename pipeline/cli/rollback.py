"""`pipeline rollback`: exchange the package of a running deployment for the one that was served before."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.options import complete_deployment, json_option, store_option
from pipeline.cli.rollout import (
    drain_option,
    dry_run_option,
    exchange,
    find_running,
    in_place_option,
    skip_golden_option,
)
from pipeline.errors import UserError


@click.command(name="rollback")
@click.argument("recipe", metavar="NAME|RECIPE", shell_complete=complete_deployment)
@store_option
@skip_golden_option
@in_place_option
@drain_option
@dry_run_option
@json_option
def command(
    recipe: str,
    store: Path | None,
    skip_golden: bool,
    in_place: bool,
    drain_s: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve the package again that was served before the last `pipeline rollout`, in the same way as that does it.

    A second rollback takes it back. The package is known for as long as the deployment runs.

    \b
    pipeline rollback tiny-cpu
    """
    from pipeline.store import Store

    shelf = Store.at(store)
    name, server = find_running(recipe, (), shelf)
    if server.previous is None:
        raise UserError(f"{name}: no other package was served before, so there is none to go back to")
    exchange(
        "rollback", name, server, server.previous, None, shelf,
        words=(), skip_golden=skip_golden, in_place=in_place, drain_s=drain_s, dry_run=dry_run, as_json=as_json,
    )  # fmt: skip
