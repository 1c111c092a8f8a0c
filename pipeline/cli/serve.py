"""`pipeline serve`: Triton and the OpenAI gateway of some recipes, on this machine, supervised."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import is_quiet, note, print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.gateway.settings import GatewaySettings, GatewayStart
from pipeline.plan.settings import PackageSettings
from pipeline.serving.settings import LaunchSettings, SupervisionSettings
from pipeline.settings import Option, Settings

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
    detached: Annotated[int | None, Option(hidden=True)] = None  # descriptor of a `_ServeStart`
    no_gateway: bool = Field(
        default=False, description="Run Triton alone, without the OpenAI API in front of it."
    )
    dry_run: bool = Field(
        default=False, description="Print what would be run, also of what is not built yet."
    )
    as_json: Annotated[bool, Option("--json")] = Field(
        default=False, description="With --dry-run: print one JSON object."
    )


class _ServeStart(Settings):
    """Everything that a supervisor needs to know: from its command line, or as a message from `serve --detach`."""

    recipes: tuple[str, ...]
    overrides: tuple[str, ...]
    store: Path | None
    mode: _Mode
    wanted: PackageSettings
    launch: LaunchSettings
    supervision: SupervisionSettings
    gateway: GatewaySettings


@click.command(name="serve")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_recipe)
@set_option
@store_option
@options_of(_Mode, "mode")
@options_of(PackageSettings, "wanted")
@options_of(LaunchSettings, "launch")
@options_of(SupervisionSettings, "supervision")
@options_of(GatewaySettings, "gateway")
def command(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    mode: _Mode,
    wanted: PackageSettings,
    launch: LaunchSettings,
    supervision: SupervisionSettings,
    gateway: GatewaySettings,
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
    start = _ServeStart(
        recipes=recipes, overrides=overrides, store=store, mode=mode, wanted=wanted, launch=launch,
        supervision=supervision, gateway=gateway,
    )  # fmt: skip
    _serve(start if mode.detached is None else _ServeStart.from_descriptor(mode.detached))


def _serve(start: _ServeStart) -> None:
    from pipeline.dropping_output import drop_unwritable_output
    from pipeline.serving.deployments import recipe_of
    from pipeline.serving.launch import ServeOptions, traces_endpoint
    from pipeline.serving.ports import Ports
    from pipeline.serving.serve import serve, stop_on_signals
    from pipeline.stages.served_package import choose_package
    from pipeline.store import Store

    mode, wanted, launch, supervision = start.mode, start.wanted, start.launch, start.supervision
    _check_usage(start)
    if not (mode.dry_run or mode.detach):
        drop_unwritable_output()
    report = reporter(silent=mode.as_json)
    store = Store.at(start.store)
    options = ServeOptions(
        Ports.free(),
        launch,
        supervision,
        supervision.restart_policy,
        store,
        allowed_hosts=start.gateway.allowed_hosts,
        allowed=wanted.allowed,
        traces=traces_endpoint(start.gateway.traces),
    )
    packages: list[tuple[ChosenPackage, ServeOptions]] = []
    for name in start.recipes or (None,):
        recipe = None if name is None else recipe_of(name, start.overrides, store)
        chosen = choose_package(recipe, store, wanted, report, preview=mode.dry_run)
        serving = chosen.served_recipe.serving
        ports = Ports.free(http=serving.http, grpc=serving.grpc) if packages else launch.choose_ports(serving)
        packages.append((chosen, replace(options, ports=ports, recipe=chosen.argv, settings=chosen.settings)))
    if mode.dry_run:
        _show(*packages[0], as_json=mode.as_json)
        return
    if mode.detach:
        _detach(start, packages, store)
        return
    from pipeline.private_files import owner_only

    with ExitStack() as stack:
        # What was built before may be read by others, such as the user of a container.
        stack.enter_context(owner_only())
        started: GatewayLaunch | None = None
        if not mode.no_gateway:
            served = [chosen.served_recipe for chosen, _ in packages]
            started = stack.enter_context(_gateway_launch(start.gateway, served, store))
        serve(
            [(chosen.folder, options) for chosen, options in packages],
            report,
            stop_on_signals(),
            gateway=started,
            stopped_by="Ctrl-C" if mode.detached is None else _stop_command(packages, store),
        )


def _check_usage(start: _ServeStart) -> None:
    mode = start.mode
    if len(start.recipes) > 1:
        of_one = {
            "--http-port": start.launch.http_port,
            "--grpc-port": start.launch.grpc_port,
            "--metrics-port": start.launch.metrics_port,
            "--log": start.supervision.log,
            "--package": start.wanted.package,
            "--dry-run": mode.dry_run,
        }
        if named := ", ".join(option for option, value in of_one.items() if value):
            raise click.UsageError(f"{named}: name one RECIPE then; several get free ports")
    if mode.as_json and not mode.dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if mode.no_wait and not mode.detach:
        raise click.UsageError("--no-wait goes with --detach")
    if not start.recipes and start.wanted.package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    if not start.recipes and start.overrides:
        raise click.UsageError("--set changes a RECIPE: name one beside --package")


@contextmanager
def _gateway_launch(
    settings: GatewaySettings, recipes: Sequence[Recipe], store: Store
) -> Iterator[GatewayLaunch]:
    """Bind the sockets of the gateway that is to be started, and make its message.

    Args:
        recipes: Recipes that are served; their servers are announced in `store`, where the gateway finds them by name.

    Raises:
        UserError: The file of keys has faults, or a package for Python is missing.
        ServerError: The address cannot be bound.
    """
    from pipeline.frontend.requirements import require_packages

    require_packages(recipes, store, settings)
    from pipeline.frontend.process import CHILD
    from pipeline.gateway.http_server import bound_sockets
    from pipeline.gateway.tenants import Tenants
    from pipeline.serving.gateway_process import GatewayLaunch

    tenants = Tenants.load(settings.keys) if settings.keys else Tenants()
    host, port = settings.host, settings.port
    if "port" not in settings.model_fields_set and not _can_bind(host, port):
        port = 0
    with bound_sockets(host, port) as sockets:
        port = sockets[0].getsockname()[1]
        start = GatewayStart(
            recipes=tuple(recipe.name for recipe in recipes),
            store=store.root,
            settings=settings.model_copy(update={"port": port}),
            sockets=tuple(listening.fileno() for listening in sockets),
            parent=os.getpid(),
        )
        yield GatewayLaunch(
            CHILD,
            start,
            sockets,
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            needs_key=tenants.require_keys,
            drain_s=settings.drain_s,
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


def _detach(start: _ServeStart, packages: Sequence[tuple[ChosenPackage, ServeOptions]], store: Store) -> None:
    """Start this command again as a process of its own, and wait until it is ready."""
    from pipeline.serving.detach import DetachedEnded, start_detached, wait_until_ready

    names, wait = [chosen.deployment.name for chosen, _ in packages], not start.mode.no_wait
    # All is built by now.
    wanted = start.wanted.model_copy(update={"build": False})
    update = {"wanted": wanted, "mode": _Mode(no_gateway=start.mode.no_gateway, detached=0)}
    with os.fdopen(start.model_copy(update=update).to_descriptor()) as message:
        descriptor = message.fileno()
        command = (sys.executable, "-m", "pipeline.cli.main", "serve", "--detached", str(descriptor))
        started = start_detached(command, store, names, inherit=[descriptor])
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
