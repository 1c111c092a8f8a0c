"""`pipeline init`: a recipe for a model of one's own, with limits that fit."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, json_option, open_store
from pipeline.cli.output import note, print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.plan.settings import InitSettings

if TYPE_CHECKING:
    from pipeline.prepare.initial_recipe import InitialRecipe
    from pipeline.recipe import HubSource, LocalSource


def _source(_context: click.Context, _parameter: click.Parameter, text: str) -> HubSource | LocalSource:
    from pydantic_core import PydanticCustomError

    from pipeline.recipe.source import parse_source

    try:
        return parse_source(text)
    except PydanticCustomError as error:
        fix = (error.context or {}).get("fix", "")
        raise click.BadParameter(f"{text}: {error.message()}; {fix}") from None


@click.command(name="init", cls=Verb)
@click.argument("source", metavar="hf:ORG/NAME|local:FOLDER", callback=_source)
@options_of(InitSettings)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Where to write it; by default NAME.yaml, and - is standard output.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@json_option
def command(
    source: HubSource | LocalSource,
    settings: InitSettings,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a recipe for a model of your own: limits and formats that fit, each with its reason in a comment.

    No weights are downloaded: config.json and the headers of the files say what fits. What is written passes `pipeline
    recipes validate` and `pipeline plan`; a model that fits nowhere is refused with the reason (exit code 2).

    \b
    pipeline init hf:Qwen/Qwen2.5-0.5B-Instruct
    pipeline init local:./my-model --output my.yaml
    pipeline init hf:meta-llama/Llama-3.3-70B-Instruct --gpu h100-sxm-80g --gpus 4 --output -
    """
    from pipeline.prepare.initial_recipe import InitRequest, initial_recipe
    from pipeline.recipe.catalog import annotated_yaml, write_recipe

    artifacts = open_store()
    request = InitRequest(source=source, **dict(settings))
    first = initial_recipe(request, artifacts, progress=reporter(silent=as_json))
    file = output or Path(f"{first.recipe.name}.yaml")
    prints = str(file) == "-"
    text = annotated_yaml(_head(first, file), first.values, first.reasons)
    if not prints:
        write_recipe(text, file, force=force)
    if as_json:
        print_json(
            {
                "file": None if prints else str(file.absolute()),
                "place": first.place,
                "verdict": first.report.verdict,
                "recipe": first.recipe.model_dump(mode="json"),
                "reasons": dict(first.reasons),
            }
        )
        return
    if prints:
        click.echo(text, nl=False)
    note(f"{first.recipe.name} on {first.place}: {first.report.verdict}")
    if not prints:
        argv = shlex.join((str(file.absolute()), *artifacts.argv))
        click.echo(f"wrote {file}")
        click.echo(f"next: pipeline build {argv}")
        click.echo(f'then: pipeline serve {argv}   ask: pipeline stream {argv} "…"')


def _head(first: InitialRecipe, file: Path) -> list[str]:
    named = shlex.quote(str(file)) if str(file) != "-" else "RECIPE"
    return [
        f"{first.recipe.model.source} on {first.place}, by pipeline init on {datetime.now(UTC):%Y-%m-%d}.",
        f"pipeline build {named} && pipeline serve {named}",
        f"A comment says why the value below it is what it is. After a change: pipeline recipes validate {named}",
    ]
