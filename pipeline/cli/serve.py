"""`pipeline serve`: Triton and the OpenAI gateway of some recipes, on this machine, supervised."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import is_quiet, note, print_json, reporter
from pipeline.cli.serving import (
    choose_package,
    launch_options,
    serve_options_of,
    stop_on_signals,
    supervision_options,
)
from pipeline.cli.settings_options import options_of
from pipeline.gateway.settings import GatewaySettings, GatewayStart

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pipeline.cli.serving import ChosenPackage
    from pipeline.recipe import Recipe
    from pipeline.serving.gateway_process import GatewayLaunch
    from pipeline.serving.launch import ServeOptions
    from pipeline.store import Store


class _Repeatable(click.Command):
    """A command that can be started again by another process: it keeps its options as they were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_GIVEN], _, _ = self.make_parser(ctx).parse_args(list(args))
        return super().parse_args(ctx, args)


@click.command(name="serve", cls=_Repeatable)
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
@options_of(GatewaySettings, "gateway_settings")
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
    gateway_settings: GatewaySettings,
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
    options |= {"allowed_hosts": gateway_settings.allowed_hosts, "traces": gateway_settings.traces}
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
            gateway = stack.enter_context(_gateway_launch(gateway_settings, served, shelf))
        serve(
            [(chosen.folder, of) for chosen, of in packages],
            report,
            stop_on_signals(),
            gateway=gateway,
            stopped_by=_stop_command(packages, shelf) if detached else "Ctrl-C",
        )


@contextmanager
def _gateway_launch(
    settings: GatewaySettings, recipes: Sequence[Recipe], store: Store
) -> Iterator[GatewayLaunch]:
    """Bind the sockets of the gateway that is to be started, and make its message.

    Args:
        settings: Settings of the gateway.
        recipes: Recipes that are served; their servers are announced in `store`, where the gateway finds them by name.
        store: Store of artifacts.

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
    words = _given_argv(context, without={"detach", "no_wait", "build", "quiet"})
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


_GIVEN = "pipeline.given"  # key of click's `Context.meta`: name of an option -> its words


def _given_argv(context: click.Context, *, without: Collection[str]) -> list[str]:
    """Return the options of the command as they were given, without some, for another command line."""
    given: dict[str, Any] = context.meta[_GIVEN]
    argv: list[str] = []
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name not in given or option.name in without:
            continue
        value = given[option.name]
        if option.count:
            argv += [option.opts[0]] * value
        elif option.is_flag:
            argv.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            for text in value if isinstance(value, list) else (value,):
                argv += [option.opts[0], text]
    return argv
