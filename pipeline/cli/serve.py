"""`pipeline serve`: Triton and the OpenAI gateway of some recipes, on this machine, supervised."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource
from pydantic import Field

from pipeline.cli.gateway import require_packages
from pipeline.cli.gateway_options import StartsGateway, gateway_option_names, gateway_options, given_words
from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import is_quiet, note, print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.serving.deployments import recipe_of
from pipeline.serving.settings import LaunchSettings, SupervisionSettings
from pipeline.settings import Option, Settings
from pipeline.stages.served_package import PackageSettings, choose_package

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.recipe import Recipe
    from pipeline.serving.gateway_process import GatewayLaunch
    from pipeline.serving.launch import ServeOptions
    from pipeline.stages.served_package import ChosenPackage
    from pipeline.store import Store


class _Mode(Settings):
    """Things to do with what is served."""

    detach: Annotated[bool, Option("-d --detach")] = Field(
        default=False, description="Return when it is ready, and leave it running: see ps, logs, stop."
    )
    no_wait: bool = Field(default=False, description="With --detach: return at once.")
    detached: Annotated[bool, Option(hidden=True)] = False
    no_gateway: bool = Field(
        default=False, description="Run Triton alone, without the OpenAI API in front of it."
    )
    dry_run: bool = Field(
        default=False, description="Print what would be run, also of what is not built yet."
    )
    as_json: Annotated[bool, Option("--json")] = Field(
        default=False, description="With --dry-run: print one JSON object."
    )


@click.command(name="serve", cls=StartsGateway)
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_recipe)
@set_option
@store_option
@options_of(_Mode, "mode")
@options_of(PackageSettings, "wanted")
@options_of(LaunchSettings, "launch")
@options_of(SupervisionSettings, "supervision")
@gateway_options
@click.pass_context
def command(
    context: click.Context,
    /,
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    mode: _Mode,
    wanted: PackageSettings,
    launch: LaunchSettings,
    supervision: SupervisionSettings,
    **gateway: Any,
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
    from pipeline.serving.launch import ServeOptions, traces_endpoint
    from pipeline.serving.ports import Ports
    from pipeline.serving.serve import serve, stop_on_signals
    from pipeline.store import Store

    _check_usage(recipes, overrides, mode, wanted, launch, supervision)
    if not (mode.dry_run or mode.detach):
        drop_unwritable_output()
    report = reporter(silent=mode.as_json)
    opened = Store.at(store)
    options = ServeOptions(
        Ports.free(),
        launch,
        supervision,
        supervision.restart_policy,
        opened,
        allowed_hosts=gateway["allowed_hosts"],
        allowed=frozenset(wanted.allowed),
        traces=traces_endpoint(gateway["traces"]),
    )
    packages: list[tuple[ChosenPackage, ServeOptions]] = []
    for name in recipes or (None,):
        recipe = None if name is None else recipe_of(name, overrides, opened)
        chosen = choose_package(recipe, opened, wanted, report, preview=mode.dry_run)
        serving = chosen.served_recipe.serving
        ports = Ports.free(http=serving.http, grpc=serving.grpc) if packages else launch.choose_ports(serving)
        packages.append((chosen, replace(options, ports=ports, recipe=chosen.argv, settings=chosen.settings)))
    if mode.dry_run:
        _show(*packages[0], as_json=mode.as_json)
        return
    if mode.detach:
        _detach(context, packages, opened, wait=not mode.no_wait)
        return
    from pipeline.private_files import owner_only

    with ExitStack() as stack:
        # What was built before may be read by others, such as the user of a container.
        stack.enter_context(owner_only())
        started: GatewayLaunch | None = None
        if not mode.no_gateway:
            served = [chosen.served_recipe for chosen, _ in packages]
            started = stack.enter_context(_gateway_launch(context, served, opened))
        serve(
            [(chosen.folder, options) for chosen, options in packages],
            report,
            stop_on_signals(),
            gateway=started,
            stopped_by=_stop_command(packages, opened) if mode.detached else "Ctrl-C",
        )


def _check_usage(
    recipes: Sequence[str],
    overrides: Sequence[str],
    mode: _Mode,
    wanted: PackageSettings,
    launch: LaunchSettings,
    supervision: SupervisionSettings,
) -> None:
    if len(recipes) > 1:
        of_one = {
            "--http-port": launch.http_port,
            "--grpc-port": launch.grpc_port,
            "--metrics-port": launch.metrics_port,
            "--log": supervision.log,
            "--package": wanted.package,
            "--dry-run": mode.dry_run,
        }
        if named := ", ".join(option for option, value in of_one.items() if value):
            raise click.UsageError(f"{named}: name one RECIPE then; several get free ports")
    if mode.as_json and not mode.dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if mode.no_wait and not mode.detach:
        raise click.UsageError("--no-wait goes with --detach")
    if not recipes and wanted.package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    if not recipes and overrides:
        raise click.UsageError("--set changes a RECIPE: name one beside --package")


@contextmanager
def _gateway_launch(
    context: click.Context, recipes: Sequence[Recipe], store: Store
) -> Iterator[GatewayLaunch]:
    """Bind the sockets of the gateway that is to be started, and make its command line.

    Args:
        context: Context of this command, whose `gateway_options` are handed on.
        recipes: Recipes that are served; their servers are announced in `store`, where the gateway finds them by name.

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


def _stop_command(packages: Sequence[tuple[ChosenPackage, ServeOptions]], store: Store) -> str:
    names = (chosen.deployment.name for chosen, _ in packages)
    return shlex.join(("pipeline", "stop", *names, *store.words))


def _detach(
    context: click.Context,
    packages: Sequence[tuple[ChosenPackage, ServeOptions]],
    store: Store,
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
    started = start_detached(command, store, names)
    try:
        if wait:
            wait_until_ready(started, note)
    except DetachedEnded as error:
        if is_quiet():
            click.echo("\n".join(error.last_lines), err=True)
        raise
    logs = shlex.join(("pipeline", "logs", names[0], *store.words))
    state = "runs" if wait else "starts"
    click.echo(
        f"{', '.join(names)} {state} as process {started.pid}   logs: {logs}   stop: {_stop_command(packages, store)}"
    )
