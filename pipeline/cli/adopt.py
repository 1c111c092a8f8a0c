"""`pipeline adopt`: take what was built on another machine into the store."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.options import Verb, open_store, recipe_argument
from pipeline.cli.output import reporter
from pipeline.cli.settings_options import options_of
from pipeline.plan.settings import PreparationSettings


@click.command(name="adopt", cls=Verb)
@recipe_argument
@click.argument("step", metavar="STEP")
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path))
@options_of(PreparationSettings, "preparation")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    step: str,
    folder: Path,
    preparation: PreparationSettings,
) -> None:
    """Take FOLDER, which a script of `pipeline build RECIPE --executor print` left, as STEP of the build of RECIPE.

    That is the folder of an engine, or an artifact that the script of a whole build made in a store of its own. Its
    checksums, what it was made from, and all that an engine says of itself are checked as if it had been built here.
    The folder is copied and left as it is.

    \b
    pipeline adopt llama-3.1-8b-fp8 build.target llama-3.1-8b-fp8-engines/target
    pipeline adopt llama-3.1-8b-fp8 package package-42e451333aac24b05b44
    """
    from pipeline.prepare import prepare
    from pipeline.recipe import load_recipe
    from pipeline.stages import adopt

    loaded = load_recipe(recipe, overrides)
    report = reporter()
    opened = open_store()
    prepared = prepare(loaded, opened, progress=report, allowed=preparation.allowed)
    artifact = opened.find(prepared.plan[step].key)
    if artifact is None:
        artifact = adopt(prepared, step, folder.absolute(), opened, report)
        report.say(f"{loaded.name}: adopted {step} from {folder}")
    else:
        report.say(f"{loaded.name}: {step} is in the store already; {folder} is not needed")
    click.echo(str(artifact.path))
