"""`pipeline serve`: Triton of this machine in the foreground; the short form of `pipeline deploy`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.options import recipe_argument, store_option
from pipeline.cli.output import reporter
from pipeline.cli.serving import package_of, serving_options, stop_on_signals


@click.command(name="serve")
@recipe_argument
@store_option
@serving_options
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    allowed: frozenset[str],
    build: bool,
    offline: bool,
    address: str,
    http_port: int | None,
    grpc_port: int | None,
    metrics_port: int | None,
    start_timeout_s: float | None,
    health_interval_s: float,
    log: Path | None,
) -> None:
    """Run Triton with the model of RECIPE on this machine until Ctrl-C.

    It is ready when a real generation came back, and nothing that it starts outlives this command.

    \b
    pipeline serve tiny-cpu
    pipeline serve tiny-cpu --grpc-port 9001 --log triton.log
    """
    from pipeline.serving.launch import Ports, ServeOptions
    from pipeline.serving.serve import serve
    from pipeline.store import Store

    report = reporter()
    shelf = Store.at(store)
    package, words = package_of(
        recipe, overrides, shelf, build=build, offline=offline, report=report, allowed=allowed
    )
    options = ServeOptions(
        ports=Ports.choose(address, http=http_port, grpc=grpc_port, metrics=metrics_port),
        address=address,
        log_file=log,
        start_deadline_s=start_timeout_s,
        health_interval_s=health_interval_s,
        running=shelf.running,
        hashes=shelf.hashes,
        allowed=allowed,
        recipe=words,
    )
    serve(package, options, report, stop_on_signals())
