"""Serve recipes on this machine with a gateway in front of them, in this process or in a detached one."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.errors import Fault, InvalidInput, ServerError
from pipeline.frontend.requirements import require_packages
from pipeline.gateway.settings import GatewaySettings, GatewayStart, ListenSettings
from pipeline.keeper import RestartPolicy
from pipeline.plan.settings import PackageSettings
from pipeline.private_files import owner_only
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.serving.deployments import recipe_to_serve
from pipeline.serving.detach import DetachedSupervisor, start_detached
from pipeline.serving.gateway_process import GatewayLaunch
from pipeline.serving.launch import ServeOptions, traces_endpoint
from pipeline.serving.ports import Ports
from pipeline.serving.serve import serve, stop_on_signals
from pipeline.settings import Settings
from pipeline.stages.served_package import ChosenPackage, choose_package
from pipeline.store import Store

# Command line of a process that gets a `ServeStart`: the number of its descriptor follows.
_CHILD = (sys.executable, "-m", "pipeline.cli.main", "serve", "--detached")

ServedPackages = Sequence[tuple[ChosenPackage, ServeOptions]]


class ServeStart(Settings):
    """Everything that a supervisor needs to know: from its command line, or as a message from `serve --detach`.

    Attributes:
        recipes: Names or files of recipes; empty for a package alone.
        gpus: GPUs that may be used; empty for all that are needed.
        listening: Address and keys of the gateway.
        no_gateway: Whether Triton runs alone.
        detached: Whether it runs in a process of its own, without a terminal.
    """

    recipes: tuple[str, ...]
    overrides: tuple[str, ...]
    store: Path | None
    wanted: PackageSettings
    gpus: tuple[int, ...] = ()
    listening: ListenSettings = ListenSettings()
    no_gateway: bool = False
    detached: bool = False


def choose_packages(start: ServeStart, store: Store, progress: Progress, *, preview: bool) -> ServedPackages:
    """Choose the packages to serve and their ports; Triton's usual ports are those of the first.

    Raises:
        InvalidInput: Two recipes name one port or one log, or do not agree in their sections `gateway`.
        UserError: A package is not built.
        GateFailed: Figures of a package are over its recipe's budgets.
    """
    packages: list[tuple[ChosenPackage, ServeOptions]] = []
    for name in start.recipes or (None,):
        recipe = recipe_to_serve(name, start.overrides, store, start.wanted.package)
        chosen = choose_package(recipe, store, start.wanted, progress, preview=preview)
        served = chosen.served_recipe
        options = ServeOptions(
            Ports.choose(served, usual=not packages),
            served.triton,
            start.gpus,
            RestartPolicy(served.triton.max_restarts, served.triton.restart_window_s),
            store,
            allowed_hosts=served.gateway.allowed_hosts,
            allowed=start.wanted.allowed,
            recipe=chosen.argv,
            settings=chosen.settings,
            traces=traces_endpoint(served.gateway.traces),
        )
        packages.append((chosen, options))
    recipes = [chosen.served_recipe for chosen, _ in packages]
    _check_distinct(recipes)
    if not start.no_gateway:
        GatewaySettings.of(start.listening, recipes)
    return packages


def _check_distinct(recipes: Sequence[Recipe]) -> None:
    """Check that no two recipes name one port, or one log. Raises InvalidInput otherwise."""
    named: dict[tuple[str, object], list[str]] = {}
    for recipe in recipes:
        wanted = recipe.triton
        for port in {wanted.http_port, wanted.grpc_port, wanted.metrics_port}:
            named.setdefault(("a port of triton", port), []).append(recipe.name)
        named.setdefault(("triton.log", wanted.log), []).append(recipe.name)
    faults = [
        Fault(
            f"is named by {' and by '.join(names)}", key=key, value=value, fix="leave it out, or name another"
        )
        for (key, value), names in named.items()
        if value is not None and len(names) > 1
    ]
    if faults:
        raise InvalidInput("several recipes on one machine", faults)


def serve_packages(start: ServeStart, packages: ServedPackages, store: Store, progress: Progress) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        PipelineError: See `pipeline.serving.serve.serve`; or the gateway's keys have faults, or it cannot be bound.
    """
    with ExitStack() as stack:
        # Artifacts that were built before may be read by others, such as the user of a container.
        stack.enter_context(owner_only())
        gateway: GatewayLaunch | None = None
        if not start.no_gateway:
            recipes = [chosen.served_recipe for chosen, _ in packages]
            try:
                gateway = stack.enter_context(_gateway_launch(start.listening, recipes, store))
            except ServerError as error:
                taken = [
                    fault
                    for _, options in packages
                    if not options.ports.movable
                    for fault in options.ports.faults(options.triton.address)
                ]
                raise ServerError("; ".join((str(error), *taken))) from error
        serve(
            [(chosen.folder, options) for chosen, options in packages],
            progress,
            stop_on_signals(),
            gateway=gateway,
            stopped_by=stop_command(packages, store) if start.detached else "Ctrl-C",
        )


def detach(start: ServeStart, packages: ServedPackages, store: Store) -> DetachedSupervisor:
    """Serve packages in a process of its own.

    Raises:
        UserError: One of them is served already, or the folder of logs cannot be written.
    """
    # All is built by now.
    wanted = start.wanted.model_copy(update={"build": False})
    message = start.model_copy(update={"wanted": wanted, "detached": True}).to_descriptor()
    with os.fdopen(message):
        names = [chosen.deployment.name for chosen, _ in packages]
        return start_detached((*_CHILD, str(message)), store, names, inherit=[message])


def stop_command(packages: ServedPackages, store: Store) -> str:
    """Return the command that ends these deployments."""
    names = (chosen.deployment.name for chosen, _ in packages)
    return shlex.join(("pipeline", "stop", *names, *store.argv))


@contextmanager
def _gateway_launch(
    listening: ListenSettings, recipes: Sequence[Recipe], store: Store
) -> Iterator[GatewayLaunch]:
    """Bind the sockets of the gateway that is to be started, and make its message.

    Args:
        recipes: Recipes that are served; their servers are announced in `store`, where the gateway finds them by name.

    Raises:
        InvalidInput: The recipes do not agree in their sections `gateway`.
        UserError: The file of keys has faults, or a package for Python is missing.
        ServerError: The address cannot be bound.
    """
    settings = GatewaySettings.of(listening, recipes)
    require_packages(recipes, store, settings)
    # The packages of the gateway are there now.
    from pipeline.frontend.process import CHILD
    from pipeline.gateway.http_server import bound_sockets
    from pipeline.gateway.tenants import Tenants

    tenants = Tenants.load(settings.keys) if settings.keys else Tenants()
    host, port = settings.host, settings.port
    if "port" not in listening.model_fields_set and not _can_bind(host, port):
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
    from pipeline.gateway.http_server import bound_sockets

    try:
        with bound_sockets(host, port) as sockets:
            for listening in sockets:
                listening.listen()
    except (OSError, ServerError):
        return False
    return True
