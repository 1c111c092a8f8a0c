"""`pipeline serve`: Triton in the foreground, from a package to answered requests."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from pipeline import progress as progress_to
from pipeline.cli.options import recipe_argument, store_option


@click.command(name="serve")
@recipe_argument
@store_option
@click.option("--build", is_flag=True, help="Build what is missing first, as `pipeline build` does.")
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--http-port", type=int, metavar="PORT", help="By default 8000, or a free one if that is taken."
)
@click.option("--grpc-port", type=int, metavar="PORT", help="By default 8001, or a free one.")
@click.option("--metrics-port", type=int, metavar="PORT", help="By default 8002, or a free one.")
@click.option(
    "--start-timeout-s", default=120.0, show_default=True, help="Give up when it is not ready by then."
)
@click.option(
    "--health-interval-s", default=30.0, show_default=True, help="Time between checks by inference; 0: none."
)
@click.option(
    "--log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Triton's own log."
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    build: bool,
    offline: bool,
    address: str,
    http_port: int | None,
    grpc_port: int | None,
    metrics_port: int | None,
    start_timeout_s: float,
    health_interval_s: float,
    log: Path | None,
) -> None:
    """Run Triton with the model of RECIPE until Ctrl-C.

    It is ready when a real generation came back, and nothing that it starts outlives this command.

    \b
    pipeline serve tiny-cpu
    pipeline serve tiny-cpu --grpc-port 9001 --log triton.log
    """
    from pipeline.deploy.local import LocalDeployment
    from pipeline.recipe import load_recipe
    from pipeline.stages import Builder, prepare
    from pipeline.store import Store
    from pipeline.triton.launch import Ports
    from pipeline.triton.server import TritonServer

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    loaded = load_recipe(recipe, overrides)
    report = progress_to.for_stream()
    shelf = Store.at(store)
    prepared = prepare(loaded, shelf, offline=offline, progress=report)
    builder = Builder(prepared.plan, shelf, prepared.work(report, shelf), report)
    package = builder.run() if build else builder.finished()
    server = TritonServer.of_package(
        package.path,
        ports=Ports.choose(address, http=http_port, grpc=grpc_port, metrics=metrics_port),
        address=address,
        log_file=log,
        start_deadline_s=start_timeout_s,
    )
    deployment = LocalDeployment(loaded.name, package.path, server, shelf, report)
    deployment.run(stop, health_interval_s=health_interval_s)
