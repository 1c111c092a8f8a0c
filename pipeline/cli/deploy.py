"""`pipeline deploy`: what other tools run a deployment by: a docker script, a compose file, a systemd unit."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import complete_recipe, set_option, store_option
from pipeline.cli.output import note, print_json, reporter
from pipeline.cli.serving import choose_package, launch_options, serve_options_of
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.cli.serving import ChosenPackage
    from pipeline.serving.manifests import ManifestTarget


def _target(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value == "local":
        raise click.BadParameter("this machine is what `pipeline serve` serves on")
    return value


@click.command(name="deploy")
@click.argument("recipe", metavar="[RECIPE]", required=False, shell_complete=complete_recipe)
@set_option
@store_option
@click.option(
    "--target",
    type=click.Choice(["docker", "compose", "systemd", "local"]),
    callback=_target,
    metavar="docker|compose|systemd",
    help="A script with the `docker run` line of Triton; a compose file, or a systemd unit, of Triton and the gateway. "
    "By default docker, and systemd for a CPU.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write into this folder; by default it is printed.",
)
@click.option("--dry-run", is_flag=True, help="Write nothing; also of a recipe that is not built yet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the file's text.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8080,
    show_default=True,
    help="Where the gateway is to listen, on --address.",
)
@click.option("--gateway-image", metavar="NAME", help="Image of the gateway in a compose file.")
@click.option(
    "--memory",
    metavar="SIZE",
    callback=lambda _, __, given: _size(given),
    help="Most host memory that Triton may take, such as 64G; by default all.",
)
@click.option("--user", default="pipeline", show_default=True, help="Who runs the systemd unit.")
@launch_options
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    store: Path | None,
    target: Any,
    output: Path | None,
    dry_run: bool,
    as_json: bool,
    port: int,
    gateway_image: str | None,
    memory: str | None,
    user: str,
    **options: Any,
) -> None:
    """Write what other tools run RECIPE by, and run nothing; on this machine, `pipeline serve` runs it.

    A compose file has Triton and the OpenAI gateway, with health checks by inference, limits, GPUs and what happens
    when one dies. A systemd unit runs `pipeline serve` as a service of its own user.

    \b
    pipeline deploy llama-3.1-8b-fp8
    pipeline deploy llama-3.1-8b-fp8 --target compose --output ./deployment --memory 64G
    pipeline deploy --package ./package --target systemd
    """
    from pipeline.serving.manifests import ManifestOptions, manifest
    from pipeline.store import Store

    shelf = Store.at(store)
    report = reporter(silent=as_json)
    chosen = choose_package(recipe, overrides, shelf, options, report, preview=dry_run)
    kind: ManifestTarget = target or ("systemd" if chosen.deployment.requirements is None else "docker")
    more = ManifestOptions(
        gateway_port=port,
        gateway_image=gateway_image,
        memory=memory,
        recipe=_recipe_text(chosen),
        user=user,
        program=_program(),
    )
    serving = serve_options_of(_with_usual_ports(options), shelf, chosen)
    name, text = manifest(kind, chosen.deployment, chosen.folder, serving, more)
    written = None
    if output is not None and not dry_run:
        written = _write(output / name, text)
    if as_json:
        print_json(
            {
                "name": chosen.deployment.name,
                "target": kind,
                "package": str(chosen.folder),
                "built": chosen.built,
                "note": chosen.note,
                "files": {name: text},
                "written": None if written is None else str(written),
            }
        )
        return
    for line in chosen.note.splitlines():
        note(line)
    if written is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {written}")


def _with_usual_ports(options: dict[str, Any]) -> dict[str, Any]:
    """Ports that are taken here may be free where it will run."""
    usual = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
    return options | {name: options[name] or port for name, port in usual.items()}


def _recipe_text(chosen: ChosenPackage) -> str | None:
    from pipeline.recipe.yaml_reader import dump_yaml

    return None if chosen.settings is None else dump_yaml(dict(chosen.settings))


def _program() -> tuple[str, ...]:
    """What starts this installation, in any folder and whoever's process it is."""
    script = shutil.which("pipeline")
    return (script,) if script is not None else (sys.executable, "-m", "pipeline.cli.main")


def _size(text: str | None) -> str | None:
    import re

    if text is None or re.fullmatch(r"[1-9]\d*[KMGT]", text):
        return text
    raise click.BadParameter(f"{text}: write a number and K, M, G or T, like 64G")


def _write(file: Path, text: str) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            file.chmod(0o755)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    return file.absolute()
