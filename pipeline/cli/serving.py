"""What `pipeline serve` and `pipeline deploy` share: options, and the package of a recipe."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.options import allow_option

if TYPE_CHECKING:
    from pipeline.progress import Progress
    from pipeline.serving.launch import Ports, ServeOptions
    from pipeline.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    allow_option,
    click.option("--build", is_flag=True, help="Build what is missing first, as `pipeline build` does."),
    click.option("--offline", is_flag=True, help="Ask no hub; use what the store has."),
    click.option("--address", default="127.0.0.1", show_default=True, help="Where to listen."),
    click.option(
        "--http-port", type=int, metavar="PORT", help="By default 8000, or a free one if that is taken."
    ),
    click.option("--grpc-port", type=int, metavar="PORT", help="By default 8001, or a free one."),
    click.option("--metrics-port", type=int, metavar="PORT", help="By default 8002, or a free one."),
    click.option(
        "--start-timeout-s",
        type=click.FloatRange(min=1),
        metavar="SECONDS",
        help="Give up when it is not ready by then; by default 120, and more for large models.",
    ),
    click.option(
        "--health-interval-s",
        default=30.0,
        show_default=True,
        help="Time between checks by inference; 0: none.",
    ),
    click.option(
        "--log",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Triton's own log; by default a file in the store's folder logs.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=5,
        show_default=True,
        help="Restarts of what died or hung within the window; the failure after them ends the command.",
    ),
    click.option(
        "--restart-window-s",
        type=click.FloatRange(min=0),
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help="Failures that are older do not count.",
    ),
)


def serving_options(command: Command) -> Command:
    """Where a server listens, how long it may take, where its log goes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def serve_options_of(
    values: Mapping[str, Any],
    shelf: Store,
    words: tuple[str, ...],
    *,
    ports: Ports | None = None,
    **more: Any,
) -> ServeOptions:
    """Turn the values of `serving_options` into those of a server.

    Args:
        values: Name of an option -> its value.
        shelf: The store where the server is announced, and keeps its log.
        words: What names recipe and store on a command line.
        ports: Ports to take whatever the options say.
        more: Other fields of `ServeOptions`.
    """
    from pipeline.serving.launch import Ports, ServeOptions, traces_endpoint
    from pipeline.serving.restart import RestartPolicy

    address = values["address"]
    return ServeOptions(
        ports=ports
        or Ports.choose(
            address, http=values["http_port"], grpc=values["grpc_port"], metrics=values["metrics_port"]
        ),
        address=address,
        log_file=values["log"],
        start_deadline_s=values["start_timeout_s"],
        health_interval_s=values["health_interval_s"],
        running=shelf.running,
        logs=shelf.logs,
        restart=RestartPolicy(values["max_restarts"], values["restart_window_s"]),
        hashes=shelf.hashes,
        use=lambda package: _use(package, shelf),
        allowed=values["allowed"],
        recipe=words,
        traces=traces_endpoint(values.get("traces")),
        **more,
    )


def _use(package: Path, shelf: Store) -> bool:
    """Keep a package of the store from being collected; of one elsewhere, tell whether it is there."""
    from pipeline.store import Artifact, Manifest

    if package.parent != shelf.artifacts or not package.is_dir():
        return package.is_dir()
    return shelf.use(Artifact(package, Manifest.load(package)))


def package_of(
    recipe: str,
    overrides: tuple[str, ...],
    shelf: Store,
    *,
    build: bool,
    offline: bool,
    report: Progress,
    allowed: frozenset[str] = frozenset(),
) -> tuple[Path, tuple[str, ...]]:
    """The package that a recipe makes, from the store; made first with `build`. And what names it to clients.

    Returns:
        The package's folder, and the words of a command line that find this recipe in this store again.

    Raises:
        UserError: it is not built. GateFailed: its figures are over the recipe's budgets.
    """
    from pipeline.machine.packages import Need, require
    from pipeline.prepare import prepare
    from pipeline.recipe import load_recipe
    from pipeline.stages import Builder

    loaded = load_recipe(recipe, overrides)
    prepared = prepare(loaded, shelf, offline=offline, progress=report, allowed=allowed)
    builder = Builder(prepared, shelf, report)
    serving = [Need(extra, "serve") for extra in ("cpu", "server")] if loaded.runtime.kind == "cpu" else []
    if build:
        prepared.check(shelf, afterwards=serving)
    package = builder.run() if build else builder.finished()
    require(loaded.name, serving)
    return package.path, (*loaded.words, *shelf.words)


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set from now on; to be called when there is a server to stop.

    Before, while a package is built, both signals end the command at once as they end `pipeline build`.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
