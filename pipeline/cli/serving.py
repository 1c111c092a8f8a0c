"""What `pipeline serve` and `pipeline deploy` share: the package that is meant, where it listens, what it runs on."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.options import allow_option, gpus_option
from pipeline.errors import UserError

if TYPE_CHECKING:
    from types import FrameType

    from pipeline.progress import Progress
    from pipeline.recipe import Recipe
    from pipeline.serving.launch import ServeOptions, Target
    from pipeline.serving.ports import Ports
    from pipeline.store import Store
    from pipeline.triton.deployment import Deployment

Command = TypeVar("Command", bound=Callable[..., Any])

_LAUNCH = (
    click.option(
        "--package",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Take this package, such as one from another machine; a RECIPE beside it gives settings only.",
    ),
    allow_option,
    click.option("--build", is_flag=True, help="Build what is missing first, as `pipeline build` does."),
    click.option("--offline", is_flag=True, help="Ask no hub; use what the store has."),
    click.option(
        "--address", default="127.0.0.1", show_default=True, help="Where Triton's ports are to listen."
    ),
    click.option(
        "--http-port",
        type=int,
        metavar="PORT",
        help="Of Triton's HTTP, where the recipe opens it (serving.http); by default 8000, or a free one.",
    ),
    click.option(
        "--grpc-port", type=int, metavar="PORT", help="By default 8001, or a free one if that is taken."
    ),
    click.option("--metrics-port", type=int, metavar="PORT", help="By default 8002, or a free one."),
    click.option("--image", metavar="NAME", help="Another image than the one that the package was made for."),
    gpus_option,
    click.option(
        "--start-timeout-s",
        type=click.FloatRange(min=1),
        metavar="SECONDS",
        help="Give up when it is not ready by then; by default 120, and more for large models.",
    ),
)
_SUPERVISION = (
    click.option(
        "--container/--no-container",
        default=None,
        help="Run Triton in a container, or as processes; by default what the package needs.",
    ),
    click.option(
        "--pull-timeout-s",
        default=3600.0,
        show_default=True,
        help="Time in which an image must have been pulled.",
    ),
    click.option(
        "--health-interval-s",
        type=click.FloatRange(min=0),
        default=1.0,
        show_default=True,
        help="Time between checks by inference; 0: none.",
    ),
    click.option(
        "--hang-timeout-s",
        type=click.FloatRange(min=0.5),
        metavar="SECONDS",
        help="Time without an answer and without progress after which a model counts as hung; by default 3, and more "
        "where one step of the engine may take longer.",
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
        help="Restarts of what died or hung within the window; after them it is tried again about once a minute, "
        "and all else goes on.",
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


def launch_options(command: Command) -> Command:
    """Which package is meant, where Triton listens, what it may use: for `serve` and for `deploy`."""
    for option in reversed(_LAUNCH):
        command = option(command)
    return command


def supervision_options(command: Command) -> Command:
    """How what runs on this machine is watched and restarted, and where its log goes: for `serve`."""
    for option in reversed(_SUPERVISION):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class ChosenPackage:
    """A package that is to be served, and what is known of it.

    Attributes:
        folder: Where it lies, or will lie.
        deployment: What its deployment.json says, or will say.
        recipe: Its recipe; None where only the package is known.
        words: Words of a command line that find the recipe in this store again; empty without a recipe.
        built: Whether it is there.
        note: What is to be done before it can be run; empty if it is there.
    """

    folder: Path
    deployment: Deployment
    recipe: Recipe | None = None
    words: tuple[str, ...] = ()
    built: bool = True
    note: str = ""

    @property
    def served_recipe(self) -> Recipe:
        """The recipe that it is served with: of a package alone, what the package says."""
        from pipeline.serving.deployments import package_recipe

        return self.recipe or package_recipe(self.folder)

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """Values of the recipe, all of them, as the record of a running deployment keeps them."""
        # Golden questions are a file of the recipe's; the package has its own copy of them.
        return None if self.recipe is None else self.recipe.model_dump(mode="json", exclude={"golden"})


def choose_package(
    recipe: str | None,
    overrides: tuple[str, ...],
    shelf: Store,
    values: Mapping[str, Any],
    report: Progress,
    *,
    preview: bool = False,
) -> ChosenPackage:
    """Find the package of a recipe in the store, made first with `--build`; or take the folder of `--package`.

    Args:
        recipe: File or name; None with `--package` alone.
        overrides: Values of `--set`.
        shelf: The store.
        values: Values of `launch_options`.
        report: Where to report.
        preview: Foresee the package of a recipe that is not built, instead of refusing it.

    Raises:
        UserError: It is not built, or is not the recipe's. GateFailed: its figures are over the recipe's budgets.
    """
    from pipeline.machine.packages import Need, require
    from pipeline.prepare import prepare
    from pipeline.serving.deployments import recipe_of
    from pipeline.stages import Builder, preview_deployment
    from pipeline.triton.deployment import Deployment

    if recipe is None:
        if values["package"] is None:
            raise click.UsageError("name a RECIPE, or a folder with --package")
        if overrides:
            raise click.UsageError("--set changes a RECIPE: name one beside --package")
        return ChosenPackage(values["package"], Deployment.load(values["package"]))
    loaded = recipe_of(recipe, overrides, shelf)
    words = (*loaded.words, *shelf.words)
    if values["package"] is not None:
        deployment = Deployment.load(values["package"])
        if deployment.name != loaded.name:
            raise UserError(f"{values['package']} is the package of {deployment.name}, not of {loaded.name}")
        return ChosenPackage(values["package"], deployment, loaded, words)
    if preview:
        seen = preview_deployment(
            loaded, shelf, offline=values["offline"], progress=report, allowed=values["allowed"]
        )
        if seen.deployment is not None:
            allowing = (word for rule in sorted(values["allowed"]) for word in ("--allow", rule))
            lines = [f"Before: {shlex.join(('pipeline', 'build', *words, *allowing))}"]
            lines += [f"Where the package will be is not known: {seen.note}"] if seen.note else []
            note = "\n".join(lines)
            return ChosenPackage(seen.package, seen.deployment, loaded, words, built=False, note=note)
        return ChosenPackage(seen.package, Deployment.load(seen.package), loaded, words)
    prepared = prepare(loaded, shelf, offline=values["offline"], progress=report, allowed=values["allowed"])
    builder = Builder(prepared, shelf, report)
    serving = [Need(extra, "serve") for extra in ("cpu", "server")] if loaded.runtime.kind == "cpu" else []
    if values["build"]:
        prepared.check(shelf, afterwards=serving)
    package = builder.run() if values["build"] else builder.finished()
    require(loaded.name, serving)
    return ChosenPackage(package.path, Deployment.load(package.path), loaded, words)


def serve_options_of(
    values: Mapping[str, Any], shelf: Store, chosen: ChosenPackage, *, ports: Ports | None = None
) -> ServeOptions:
    """Turn the values of `launch_options`, and of `supervision_options` where there are any, into those of a server.

    Args:
        values: Name of an option -> its value.
        shelf: The store where the server is announced, and keeps its log.
        chosen: What is served.
        ports: Ports to take whatever the options say.
    """
    from pipeline.keeper import RestartPolicy
    from pipeline.serving.launch import ServeOptions, traces_endpoint
    from pipeline.serving.ports import Ports

    address, serving = values["address"], chosen.served_recipe.serving
    for name, opens in (("http", serving.http), ("grpc", serving.grpc)):
        if values[f"{name}_port"] and not opens:
            raise UserError(
                f"--{name}-port: the recipe does not open it: say `serving: {{{name}: true}}` there, or "
                f"--set serving.{name}=true"
            )
    if ports is None:
        ports = Ports.choose(
            address, http=values["http_port"], grpc=values["grpc_port"], metrics=values["metrics_port"],
            opens_http=serving.http, opens_grpc=serving.grpc,
        )  # fmt: skip
    launched = ServeOptions(
        ports=ports,
        address=address,
        allowed_hosts=values.get("allowed_hosts", ()),
        start_deadline_s=values["start_timeout_s"],
        allowed=values["allowed"],
        image=values["image"],
        devices=values["gpus"],
        recipe=chosen.words,
        settings=chosen.settings,
    )
    if "container" not in values:
        return launched
    targets: dict[bool | None, Target | None] = {None: None, True: "docker", False: "local"}
    return replace(
        launched,
        target=targets[values["container"]],
        pull_deadline_s=values["pull_timeout_s"],
        log_file=values["log"],
        health_interval_s=values["health_interval_s"],
        hang_timeout_s=values["hang_timeout_s"],
        running=shelf.running,
        logs=shelf.logs,
        restart=RestartPolicy(values["max_restarts"], values["restart_window_s"]),
        hashes=shelf.hashes,
        use=lambda package: _use(package, shelf),
        traces=traces_endpoint(values.get("traces")),
    )


def _use(package: Path, shelf: Store) -> bool:
    """Keep a package of the store from being collected; of one elsewhere, tell whether it is there."""
    from pipeline.store import Artifact, Manifest

    if package.parent != shelf.artifacts or not package.is_dir():
        return package.is_dir()
    return shelf.use(Artifact(package, Manifest.load(package)))


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set from now on; to be called when there is a server to stop.

    Before, while a package is built, both signals end the command at once as they end `pipeline build`. So does a
    second SIGINT; what the command has started ends with it.
    """
    stop = threading.Event()

    def end(number: int, _frame: FrameType | None) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop
