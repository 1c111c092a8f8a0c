"""`pipeline migrate`: a recipe for the LLM API from a recipe for engines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, json_option, open_store, recipe_argument
from pipeline.cli.output import note, reporter
from pipeline.cli.settings_options import options_of
from pipeline.extras import missing
from pipeline.plan.settings import MigrateSettings

if TYPE_CHECKING:
    from pipeline.prepare.migration import Migration
    from pipeline.store import Store


@click.command(name="migrate", cls=Verb)
@recipe_argument
@options_of(MigrateSettings)
@click.option("--dry-run", is_flag=True, help="Print what changes and the recipe; write nothing.")
@json_option
def command(
    recipe: str, overrides: tuple[str, ...], settings: MigrateSettings, dry_run: bool, as_json: bool
) -> None:
    """Make a recipe of runtime pytorch from RECIPE, which has runtime tensorrt, and say what changes and why.

    Engines are frozen upstream, see `pipeline versions`. The new recipe keeps the name of the deployment, the comments
    of the old file, and all that the LLM API has as well. The command prints the keys that change; each flag of
    trtllm-build and setting of config.pbtxt with the argument that says the same, or the reason why none does; what
    requests to Triton itself lose; and the plans of both side by side.

    \b
    pipeline migrate llama-3.1-8b-fp8 --dry-run
    pipeline migrate engines.yaml --output llm-api.yaml --output changes.md
    pipeline migrate engines.yaml --version 1.2.0
    pipeline migrate engines.yaml --check

    Exit code 2 if the release cannot serve the model: the text says what it lacks, and nothing is written. With --check
    also if one of the two cannot run here; 3 if the new one is over a budget of the golden questions.
    """
    from pipeline.cli.render.migrate import migration_json, migration_markdown, migration_text
    from pipeline.prepare.migration import migrate
    from pipeline.recipe.catalog import sibling_file, write_recipe
    from pipeline.serving.deployments import recipe_of

    artifacts = open_store()
    loaded = recipe_of(recipe, overrides, artifacts)
    named = settings.outputs(".yaml", ".yml")
    file = named[0] if named else sibling_file(loaded, "pytorch")
    migration = migrate(loaded, file, artifacts, version=settings.version, progress=reporter(silent=as_json))
    packages = _servable(migration, artifacts) if settings.check and not dry_run else ()
    if not dry_run and not (settings.check and _says(file, migration.text)):
        write_recipe(migration.text, file, force=settings.force)
    written = None if dry_run else file
    for other in () if dry_run else settings.outputs(".json", ".md"):
        text = (
            migration_json(migration, written) if other.suffix == ".json" else migration_markdown(migration)
        )
        other.write_text(text, encoding="utf-8")
        note(f"written: {other}")
    if as_json:
        click.echo(migration_json(migration, written), nl=False)
    else:
        click.echo(migration_text(migration))
        _say_next(migration, file, artifacts, dry_run=dry_run)
    if packages:
        from pipeline.bench.compare.settings import CompareSettings
        from pipeline.cli.compare import run_comparison

        first, second = map(str, packages)
        run_comparison(first, second, CompareSettings(), as_json=as_json, dry_run=False)


def _servable(migration: Migration, store: Store) -> tuple[Path, ...]:
    try:
        from pipeline.bench.compare.sources import servable_packages
    except ImportError as error:
        raise missing("comparing", error, "bench") from error
    return servable_packages((migration.before, migration.after), store)


def _says(file: Path, text: str) -> bool:
    """Whether a file holds this text already, as after the migration whose recipe was built since."""
    return file.is_file() and file.read_bytes() == text.encode()


def _say_next(migration: Migration, file: Path, store: Store, *, dry_run: bool) -> None:
    if dry_run:
        click.echo(f"\n{migration.text}", nl=False)
        return
    if not migration.keeps_comments and migration.before.provenance.file is not None:
        note("the comments of the old file could not be kept: its values cannot be changed in place")
    named = shlex.join((str(file.absolute()), *store.argv))
    click.echo(f"\nwrote {file}")
    click.echo(f"next: pipeline build {named}")
    click.echo(
        f"then, with both packages built: pipeline migrate {shlex.join(migration.before.argv)} --check"
    )
