"""`pipeline serve`: Triton and the OpenAI gateway of some recipes, on this machine, supervised."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from pipeline.cli.gateway import StartsGateway, gateway_command, gateway_options
from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import reporter
from pipeline.cli.serving import package_of, serve_options_of, serving_options, stop_on_signals


@click.command(name="serve", cls=StartsGateway)
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE…", shell_complete=complete_recipe)
@set_option
@store_option
@click.option("--no-gateway", is_flag=True, help="Run Triton alone, without the OpenAI API in front of it.")
@serving_options
@gateway_options
@click.pass_context
def command(
    context: click.Context,
    /,
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    no_gateway: bool,
    build: bool,
    offline: bool,
    **options: Any,
) -> None:
    """Run the models of RECIPEs on this machine until Ctrl-C: Triton, and in front of it the OpenAI API.

    They are ready when a real generation came back. What dies or hangs is started again. Nothing that this command
    starts outlives it. For what others run (a container, a unit, manifests) see `pipeline deploy`.

    \b
    pipeline serve tiny-cpu
    pipeline serve tiny-cpu --port 8000 --http-port 9000 --keys keys.yaml
    pipeline serve tiny-cpu --no-gateway --grpc-port 9001 --log triton.log
    """
    from pipeline.serving.gateway_process import GatewayLaunch
    from pipeline.serving.launch import Ports, ServeOptions
    from pipeline.serving.serve import serve
    from pipeline.store import Store

    alone = ("http_port", "grpc_port", "metrics_port", "log")
    if len(recipes) > 1 and (given := [name for name in alone if options[name] is not None]):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{named}: name one RECIPE then; several get free ports")
    report = reporter()
    shelf = Store.at(store)
    packages: list[tuple[Path, ServeOptions]] = []
    for recipe in recipes:
        package, words = package_of(
            recipe, overrides, shelf, build=build, offline=offline, report=report,
            allowed=options["allowed"],
        )  # fmt: skip
        ports = Ports.free() if packages else None
        packages.append((package, serve_options_of(options, shelf, words, ports=ports)))
    with ExitStack() as stack:
        gateway: GatewayLaunch | None = None
        if not no_gateway:
            gateway = stack.enter_context(gateway_command(context, recipes, overrides, shelf))
        serve(packages, report, stop_on_signals(), gateway=gateway)
