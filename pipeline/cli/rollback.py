"""`pipeline rollback`: exchange the package of a running deployment for the package that was served before."""

from __future__ import annotations

import click

from pipeline.cli.options import Verb, complete_deployment, json_option, open_store
from pipeline.cli.rollout import dry_run_option, run_exchange
from pipeline.cli.settings_options import options_of
from pipeline.errors import UserError
from pipeline.serving.settings import ExchangeSettings


@click.command(name="rollback", cls=Verb)
@click.argument("recipe", metavar="NAME|RECIPE", shell_complete=complete_deployment)
@options_of(ExchangeSettings, "way")
@dry_run_option
@json_option
def command(recipe: str, way: ExchangeSettings, dry_run: bool, as_json: bool) -> None:
    """Go back to the package that was served before the last `pipeline rollout`, by the same steps.

    A second rollback undoes the first. The earlier package is remembered for as long as the deployment runs.

    \b
    pipeline rollback tiny-cpu
    """
    from pipeline.serving.exchange import Exchange, find_running

    opened = open_store()
    name, server = find_running(recipe, (), opened)
    if server.previous is None:
        raise UserError(f"{name}: no other package was served before, so there is none to go back to")
    exchange = Exchange(name, server, server.previous, way, back=True)
    run_exchange(exchange, opened, dry_run=dry_run, as_json=as_json)
