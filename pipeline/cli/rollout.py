"""`pipeline rollout`: exchange the package of a running deployment for another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, complete_deployment, json_option, open_store, set_option
from pipeline.cli.output import note, print_json, print_values, reporter
from pipeline.cli.settings_options import options_of
from pipeline.plan.settings import PackageSettings
from pipeline.serving.settings import ExchangeSettings

if TYPE_CHECKING:
    from pipeline.serving.exchange import Exchange
    from pipeline.store import Store

dry_run_option = click.option("--dry-run", is_flag=True, help="Print what would be done, and exit.")


@click.command(name="rollout", cls=Verb)
@click.argument("recipe", metavar="NAME|RECIPE", shell_complete=complete_deployment)
@set_option
@options_of(PackageSettings, "wanted")
@options_of(ExchangeSettings, "way")
@dry_run_option
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    wanted: PackageSettings,
    way: ExchangeSettings,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve another package of a running deployment without failing a request.

    The new package is started beside the old one, verified, warmed up, and asked the golden questions of its recipe.
    Then new requests go to it, and the old Triton ends when it has completed its own. If anything fails before, the old
    package stays in service, and the exit code is 1. Ctrl-C leaves it in service, too.

    Triton's ports change, except with --in-place: clients go by name, and the gateway keeps its address. If both do not
    fit in memory, the rollout is refused before anything is started.

    Values of --set persist: a rollout by NAME applies those that the deployment is served with again, and says so. Give
    a key again to replace its value; a rollout by the path of the recipe's file drops them all.

    \b
    pipeline rollout tiny-cpu --build
    pipeline rollout tiny-cpu --set quantization.format=int4_awq --build
    pipeline rollout tiny-cpu --package /models/tiny-cpu-2 --dry-run
    """
    from pipeline.serving.exchange import Exchange, find_running, next_recipe
    from pipeline.stages.served_package import choose_package

    if wanted.package is not None and (wanted.build or overrides):
        raise click.UsageError("--package takes a package as it is: leave out --build and --set")
    opened = open_store()
    name, server = find_running(recipe, overrides, opened)
    if wanted.package is not None:
        package = wanted.package.resolve()
        exchange = Exchange(name, server, package, way, argv=server.recipe, values=server.settings)
    else:
        loaded = next_recipe(recipe, name, server, overrides, note)
        chosen = choose_package(loaded, opened, wanted, reporter(silent=as_json))
        exchange = Exchange(
            name, server, chosen.folder, way, recipe=loaded, argv=chosen.argv, values=chosen.settings
        )
    run_exchange(exchange, opened, dry_run=dry_run, as_json=as_json)


def run_exchange(exchange: Exchange, store: Store, *, dry_run: bool, as_json: bool) -> None:
    """Check that there is memory, and exchange the package, or print what would be done."""
    memory = exchange.check_memory(store)
    if dry_run:
        print_values(exchange.preview(memory), as_json=as_json)
        return
    try:
        result = exchange.run(note)
    except KeyboardInterrupt:
        note("cancelling the rollout")
        note(f"{exchange.name} is served from {exchange.cancel()}")
        raise click.exceptions.Exit(130) from None
    if as_json:
        print_json(result)
