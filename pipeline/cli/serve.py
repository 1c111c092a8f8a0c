"""`pipeline serve`: Triton and the OpenAI gateway of some recipes, on this machine, supervised."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipeline.cli.gateway import require_packages
from pipeline.cli.gateway_options import StartsGateway, gateway_option_names, gateway_options, given_words
from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import is_quiet, note, print_json, reporter
from pipeline.cli.serving import (
    choose_package,
    launch_options,
    serve_options_of,
    stop_on_signals,
    supervision_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.cli.serving import ChosenPackage
    from pipeline.recipe import Recipe
    from pipeline.serving.gateway_process import GatewayLaunch
    from pipeline.serving.launch import ServeOptions
    from pipeline.store import Store


@click.command(name="serve", cls=StartsGateway)
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_recipe)
@set_option
@store_option
@click.option(
    "-d", "--detach", is_flag=True, help="Return when it is ready, and leave it running: see ps, logs, stop."
)
@click.option("--no-wait", is_flag=True, help="With --detach: return at once.")
@click.option("--detached", is_flag=True, hidden=True)
@click.option("--no-gateway", is_flag=True, help="Run Triton alone, without the OpenAI API in front of it.")
@click.option("--dry-run", is_flag=True, help="Print what would be run, also of what is not built yet.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
@launch_options
@supervision_options
@gateway_options
@click.pass_context
def command(
    context: click.Context,
    /,
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    detach: bool,
    no_wait: bool,
    detached: bool,
    no_gateway: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the models of RECIPEs on this machine: Triton, and in front of it the OpenAI API, until Ctrl-C.

    They are ready when a real generation came back. What dies or hangs is started again. In the foreground nothing that
    this command starts outlives it; with --detach it returns when they are ready, and `pipeline stop` ends them. What
    other tools run (a container, a compose file, a systemd unit) is made by `pipeline deploy`.

    \b
    pipeline serve tiny-cpu
    pipeline serve tiny-cpu --detach
    pipeline serve --package ./package --port 8000 --grpc-port 9001 --keys keys.yaml
    pipeline serve tiny-cpu --no-gateway --grpc-port 9001 --log triton.log
    """
    from pipeline.dropping_output import drop_unwritable_output
    from pipeline.serving.ports import Ports
    from pipeline.serving.serve import serve
    from pipeline.store import Store

    alone = [name for name in ("http_port", "grpc_port", "metrics_port", "log", "package") if options[name]]
    if len(recipes) > 1 and (alone or dry_run):
        named = ", ".join(
            f"--{name.replace('_', '-')}" for name in [*alone, *(["dry_run"] if dry_run else [])]
        )
        raise click.UsageError(f"{named}: name one RECIPE then; several get free ports")
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if no_wait and not detach:
        raise click.UsageError("--no-wait goes with --detach")
    if not (dry_run or detach):
        drop_unwritable_output()
    report = reporter(silent=as_json)
    shelf = Store.at(store)
    packages: list[tuple[ChosenPackage, ServeOptions]] = []
    for recipe in recipes or (None,):
        chosen = choose_package(recipe, overrides, shelf, options, report, preview=dry_run)
        serving = chosen.served_recipe.serving
        ports = Ports.free(http=serving.http, grpc=serving.grpc) if packages else None
        packages.append((chosen, serve_options_of(options, shelf, chosen, ports=ports)))
    if dry_run:
        _show(*packages[0], as_json=as_json)
        return
    if detach:
        _detach(context, packages, shelf, wait=not no_wait)
        return
    from pipeline.private_files import owner_only

    with ExitStack() as stack:
        # What was built before may be read by others, such as the user of a container.
        stack.enter_context(owner_only())
        gateway: GatewayLaunch | None = None
        if not no_gateway:
            served = [chosen.served_recipe for chosen, _ in packages]
            gateway = stack.enter_context(_gateway_launch(context, served, shelf))
        serve(
            [(chosen.folder, of) for chosen, of in packages],
            report,
            stop_on_signals(),
            gateway=gateway,
            stopped_by=_stop_command(packages, shelf) if detached else "Ctrl-C",
        )


@contextmanager
def _gateway_launch(
    context: click.Context, recipes: Sequence[Recipe], store: Store
) -> Iterator[GatewayLaunch]:
    """Bind the sockets of the gateway that is to be started, and make its command line.

    Args:
        context: Of this command, whose `gateway_options` are handed on.
        recipes: What is served; their servers are announced in `store`, where the gateway finds them by name.
        store: Of artifacts.

    Raises:
        UserError: The file of keys has faults, or a package for Python is missing.
        ServerError: The address cannot be bound.
    """
    values = context.params
    require_packages(recipes, store, values["traces"], values["limits_redis"])
    from pipeline.gateway.http_server import bound_sockets
    from pipeline.gateway.tenants import Tenants
    from pipeline.serving.gateway_process import GatewayLaunch

    tenants = Tenants.load(values["keys"]) if values["keys"] else Tenants()
    words = given_words(context, gateway_option_names() - {"port"})
    usual = context.get_parameter_source("port") is ParameterSource.DEFAULT
    port = values["port"]
    if usual and not _can_bind(values["host"], port):
        port = 0
    with bound_sockets(values["host"], port) as sockets:
        for one in sockets:
            words += ["--listen-fd", str(one.fileno())]
        host, port = values["host"], sockets[0].getsockname()[1]
        yield GatewayLaunch(
            command=(
                *(sys.executable, "-m", "pipeline.cli.main", "gateway"),
                *(recipe.name for recipe in recipes),
                *words,
                *("--port", str(port), "--parent", str(os.getpid()), "--store", str(store.root)),
            ),
            sockets=sockets,
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            needs_key=tenants.require_keys,
            drain_s=values["drain_s"],
        )


def _can_bind(host: str, port: int) -> bool:
    from pipeline.errors import ServerError
    from pipeline.gateway.http_server import bound_sockets

    try:
        with bound_sockets(host, port) as sockets:
            for one in sockets:
                one.listen()
    except (OSError, ServerError):
        return False
    return True


def _show(chosen: ChosenPackage, options: ServeOptions, *, as_json: bool) -> None:
    from pipeline.serving.dry_run import dry_run

    foreseen = None if chosen.built else chosen.deployment
    made = dry_run(chosen.folder, options, foreseen, chosen.note)
    if as_json:
        print_json(made.as_json())
    else:
        click.echo(str(made))


def _stop_command(packages: Sequence[tuple[ChosenPackage, ServeOptions]], shelf: Store) -> str:
    names = (chosen.deployment.name for chosen, _ in packages)
    return shlex.join(("pipeline", "stop", *names, *shelf.words))


def _detach(
    context: click.Context,
    packages: Sequence[tuple[ChosenPackage, ServeOptions]],
    shelf: Store,
    *,
    wait: bool,
) -> None:
    """Start this command again as a process of its own, and wait until it is ready."""

    from pipeline.serving.detach import DetachedEnded, start_detached, wait_until_ready

    names = [chosen.deployment.name for chosen, _ in packages]
    # It writes to its log, where reasons are wanted also by those who print nothing.
    words = given_words(context, without={"detach", "no_wait", "build", "quiet"})
    command = (
        *(sys.executable, "-m", "pipeline.cli.main", "serve"),
        *context.params["recipes"],
        *words,
        "--detached",
    )
    started = start_detached(command, shelf.running, shelf.logs, names)
    try:
        if wait:
            wait_until_ready(started, note)
    except DetachedEnded as error:
        if is_quiet():
            click.echo("\n".join(error.said), err=True)
        raise
    logs = shlex.join(("pipeline", "logs", names[0], *shelf.words))
    state = "runs" if wait else "starts"
    click.echo(
        f"{', '.join(names)} {state} as process {started.pid}   logs: {logs}   stop: {_stop_command(packages, shelf)}"
    )
