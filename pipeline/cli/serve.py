"""`pipeline serve`: Triton and the OpenAI gateway of some recipes, on this machine, supervised."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from pipeline.cli.options import Verb, complete_recipe, set_option, store_root
from pipeline.cli.output import is_quiet, note, print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.gateway.settings import ListenSettings
from pipeline.plan.settings import DeviceSettings, PackageSettings
from pipeline.settings import Option, Settings

if TYPE_CHECKING:
    from pipeline.frontend.serve import ServedPackages, ServeStart
    from pipeline.serving.detach import DetachedSupervisor
    from pipeline.serving.launch import ServeOptions
    from pipeline.stages.served_package import ChosenPackage
    from pipeline.store import Store


class _ServeActions(Settings):
    """Things to do with what is served."""

    detach: Annotated[bool, Option("-d --detach")] = Field(
        default=False, description="Return when it is ready, and leave it running: see ps, logs, stop."
    )
    no_wait: bool = Field(default=False, description="With --detach: return at once.")
    # Descriptor of a `ServeStart`.
    detached: Annotated[int | None, Option(hidden=True)] = None
    no_gateway: bool = Field(
        default=False, description="Run Triton alone, without the OpenAI API in front of it."
    )
    dry_run: bool = Field(
        default=False, description="Print what would be run, also of what is not built yet."
    )
    as_json: Annotated[bool, Option("--json")] = Field(
        default=False, description="With --dry-run: print one JSON object."
    )


@click.command(name="serve", cls=Verb)
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_recipe)
@set_option
@options_of(_ServeActions, "mode")
@options_of(PackageSettings, "wanted")
@options_of(DeviceSettings, "placed")
@options_of(ListenSettings, "listening")
def command(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    mode: _ServeActions,
    wanted: PackageSettings,
    placed: DeviceSettings,
    listening: ListenSettings,
) -> None:
    """Run the models of RECIPEs on this machine: Triton, and in front of it the OpenAI API, until Ctrl-C.

    A model is ready once it has answered a real request. A process that dies or hangs is started again. In the
    foreground everything ends with this command; with --detach it returns when the models are ready, and
    `pipeline stop` ends them. `pipeline deploy` writes files for other tools: a container, a compose file, a systemd
    unit.

    \b
    pipeline serve tiny-cpu
    pipeline serve tiny-cpu --detach
    pipeline serve --package ./package --port 8000 --keys keys.yaml
    pipeline serve tiny-cpu --no-gateway --set triton.grpc_port=9001 --set gateway.max_waiting=64

    Limits, timeouts, ports and logs are set in the recipe's sections `gateway` and `triton`; recipes that are served
    together need the same `gateway`.
    """
    from pipeline.dropping_output import drop_unwritable_output
    from pipeline.frontend.serve import ServeStart, choose_packages, detach, serve_packages
    from pipeline.store import Store

    start = ServeStart(
        recipes=recipes, overrides=overrides, store=store_root(), wanted=wanted, gpus=placed.devices,
        listening=listening, no_gateway=mode.no_gateway,
    )  # fmt: skip
    if mode.detached is not None:
        start = ServeStart.from_descriptor(mode.detached)
    _check_usage(start, mode)
    if not (mode.dry_run or mode.detach):
        drop_unwritable_output()
    report, opened = reporter(silent=mode.as_json), Store.at(start.store)
    packages = choose_packages(start, opened, report, preview=mode.dry_run)
    if mode.dry_run:
        _show(*packages[0], as_json=mode.as_json)
    elif mode.detach:
        _wait(detach(start, packages, opened), packages, opened, wait=not mode.no_wait)
    else:
        serve_packages(start, packages, opened, report)


def _check_usage(start: ServeStart, mode: _ServeActions) -> None:
    if len(start.recipes) > 1:
        of_one = {"--package": start.wanted.package, "--dry-run": mode.dry_run}
        if named := ", ".join(option for option, value in of_one.items() if value):
            raise click.UsageError(f"{named}: name one RECIPE then")
    if mode.as_json and not mode.dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if mode.no_wait and not mode.detach:
        raise click.UsageError("--no-wait goes with --detach")
    if not start.recipes and start.wanted.package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")


def _show(chosen: ChosenPackage, options: ServeOptions, *, as_json: bool) -> None:
    from pipeline.serving.dry_run import dry_run

    foreseen = None if chosen.built else chosen.deployment
    preview = dry_run(chosen.folder, options, foreseen, chosen.note)
    if as_json:
        print_json(preview.as_json())
    else:
        click.echo(str(preview))


def _wait(started: DetachedSupervisor, packages: ServedPackages, store: Store, *, wait: bool) -> None:
    """Wait until it is ready, and print how it is looked at and ended."""
    from pipeline.frontend.serve import stop_command
    from pipeline.serving.detach import DetachedEnded, wait_until_ready

    try:
        if wait:
            wait_until_ready(started, note)
    except DetachedEnded as error:
        if is_quiet():
            click.echo("\n".join(error.last_lines), err=True)
        raise
    names = [chosen.deployment.name for chosen, _ in packages]
    logs = shlex.join(("pipeline", "logs", names[0], *store.argv))
    state = "runs" if wait else "starts"
    click.echo(
        f"{', '.join(names)} {state} as process {started.pid}   logs: {logs}   stop: {stop_command(packages, store)}"
    )
