"""`pipeline deploy`: a server that is ready, warmed up and health-checked, on this machine or in a container."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import complete_recipe, gpus_option, set_option, store_option
from pipeline.cli.output import reporter
from pipeline.cli.serving import package_of, serve_options_of, serving_options, stop_on_signals

if TYPE_CHECKING:
    from pipeline.stages import DeploymentPreview


@click.command(name="deploy")
@click.argument("recipe", metavar="[RECIPE]", required=False, shell_complete=complete_recipe)
@set_option
@store_option
@click.option(
    "--target",
    type=click.Choice(["local", "docker"]),
    help="Processes of this machine, or a container; by default what the recipe's runtime needs.",
)
@click.option(
    "--package",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Serve this package; no RECIPE is needed then.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be run, also of a recipe that is not built yet; run nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
@click.option("--image", metavar="NAME", help="Another image than the one that the package was made for.")
@gpus_option
@click.option(
    "--pull-timeout-s",
    default=3600.0,
    show_default=True,
    help="Time in which the image must have been pulled.",
)
@serving_options
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    store: Path | None,
    target: str | None,
    package: Path | None,
    dry_run: bool,
    as_json: bool,
    image: str | None,
    gpus: tuple[int, ...],
    pull_timeout_s: float,
    allowed: frozenset[str],
    build: bool,
    offline: bool,
    **serving: Any,
) -> None:
    """Serve RECIPE until Ctrl-C: checked against this machine first, ready when a real generation came back.

    Nothing that it starts outlives this command.

    \b
    pipeline deploy llama-3.1-8b-fp8 --dry-run
    pipeline deploy llama-3.1-8b-fp8 --target docker --gpus 0
    pipeline deploy --package ./package --grpc-port 9001
    """
    from pipeline.recipe import load_recipe
    from pipeline.serving.dry_run import dry_run as dry_run_of
    from pipeline.serving.serve import serve
    from pipeline.stages import preview_deployment
    from pipeline.store import Store

    if (recipe is None) == (package is None):
        raise click.UsageError("name a RECIPE, or a folder with --package")
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    report = reporter(silent=as_json)
    shelf = Store.at(store)
    words: tuple[str, ...] = ()
    foreseen: DeploymentPreview | None = None
    if package is None and dry_run:
        assert recipe is not None, "one of both was given"
        loaded = load_recipe(recipe, overrides)
        foreseen = preview_deployment(loaded, shelf, offline=offline, progress=report, allowed=allowed)
        package, words = foreseen.package, (*loaded.words, *shelf.words)
    elif package is None:
        assert recipe is not None, "one of both was given"
        package, words = package_of(
            recipe, overrides, shelf, build=build, offline=offline, report=report, allowed=allowed
        )
    options = serve_options_of(
        {**serving, "allowed": allowed},
        shelf,
        words,
        target="docker" if target == "docker" else "local" if target == "local" else None,
        image=image,
        devices=gpus,
        pull_deadline_s=pull_timeout_s,
    )
    if dry_run:
        unbuilt = None if foreseen is None else foreseen.deployment
        allowing = (word for rule in sorted(allowed) for word in ("--allow", rule))
        made = dry_run_of(package, options, unbuilt, _note(foreseen, (*words, *allowing)))
        click.echo(json.dumps(made.as_json(), indent=2) if as_json else str(made))
        return
    serve([(package, options)], report, stop_on_signals())


def _note(foreseen: DeploymentPreview | None, words: tuple[str, ...]) -> str:
    """What is to be done before the commands of a package that is not built can be run."""
    if foreseen is None or foreseen.deployment is None:
        return ""
    lines = [f"Before: {shlex.join(('pipeline', 'build', *words))}"]
    lines += [f"Where the package will be is not known: {foreseen.note}"] if foreseen.note else []
    return "\n".join(lines)
