"""`pipeline recipes`: the recipes that travel with the package, and the checks of your own."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import VerbGroup, complete_recipe, json_option, recipe_argument, set_option
from pipeline.cli.output import print_columns, print_json
from pipeline.documents import dump_yaml
from pipeline.errors import InvalidInput
from pipeline.recipe import find_recipe, packaged
from pipeline.recipe.catalog import copy_recipe, entries, schema_text

if TYPE_CHECKING:
    from pipeline.plan.preflight import Finding
    from pipeline.recipe import Recipe
    from pipeline.settings import Settings

_SCHEMAS = ("recipe", "load", "criteria", "study", "plan", "comparison", "bench", "doctor")


@click.group(name="recipes", cls=VerbGroup)
def command() -> None:
    """List, show, copy and validate recipes.

    A recipe is a YAML file. Verbs take its path, or the name of a packaged recipe.

    \b
    pipeline recipes copy tiny-cpu my.yaml
    pipeline recipes validate my.yaml
    """


@command.command()
@json_option
def ls(as_json: bool) -> None:
    """List the packaged recipes.

    \b
    pipeline recipes ls
    """
    recipes = entries()
    if as_json:
        keys = ("name", "runtime", "quantization", "purpose")
        print_json([{key: getattr(e, key) for key in keys} | {"file": str(e.file)} for e in recipes])
        return
    header = ("NAME", "RUNTIME", "QUANTIZATION", "WHAT IT IS FOR")
    print_columns([header, *((e.name, e.runtime, e.quantization, e.purpose) for e in recipes)])


@command.command()
@recipe_argument
@click.option("--resolved", is_flag=True, help="Print every value, defaults and overrides included.")
@click.option(
    "--upstream",
    is_flag=True,
    help="Print how the arguments for the LLM API differ from upstream's configuration of the model, and why.",
)
@json_option
def show(recipe: str, overrides: tuple[str, ...], resolved: bool, upstream: bool, as_json: bool) -> None:
    """Print a recipe: the file as it is, or with --resolved (or --set) all its values.

    Of a deployment that runs, and has no recipe of its name, all values are printed.

    \b
    pipeline recipes show tiny-cpu
    pipeline recipes show tiny-cpu --resolved --set quantization.format=int4_awq
    pipeline recipes show gpt-oss-120b --upstream
    """
    from pipeline.serving.deployments import is_recipe, recipe_of
    from pipeline.store import Store

    if upstream and resolved:
        raise click.UsageError("--upstream compares arguments; leave out --resolved")
    if upstream:
        _show_upstream(recipe_of(recipe, overrides, Store.default()), as_json=as_json)
        return
    if is_recipe(recipe) and not (resolved or as_json or overrides):
        click.echo(find_recipe(recipe).read_bytes(), nl=False)
        return
    values = recipe_of(recipe, overrides, Store.default()).model_dump(mode="json")
    if as_json:
        print_json(values)
    else:
        click.echo(dump_yaml(values), nl=False)


def _show_upstream(recipe: Recipe, *, as_json: bool) -> None:
    from pipeline.runtimes.pytorch.upstream import compare_with_upstream

    comparison = compare_with_upstream(recipe)
    if as_json:
        print_json(asdict(comparison))
        return
    if comparison.configuration is None:
        click.echo(f"{recipe.name}: {comparison.without}")
        return
    follows = comparison.configuration
    click.echo(f"{recipe.name} follows {follows.file}, for {', '.join(follows.models)} on {follows.gpus}")
    click.echo(f"the same: {', '.join(comparison.same)}")
    for difference in comparison.differences:
        click.echo(f"{difference.key}: upstream {difference.upstream or '–'}, here {difference.here or '–'}")
        click.echo(textwrap.indent(textwrap.fill(difference.why or "not explained", 110), "    "))


@command.command()
@click.argument("recipe", metavar="RECIPE", shell_complete=complete_recipe)
@click.argument("destination", metavar="DEST")
@click.option("--force", is_flag=True, help="Overwrite DEST.")
def copy(recipe: str, destination: str, force: bool) -> None:
    """Copy a recipe to DEST, a file or a folder, to change it there. Its local: paths stay valid.

    \b
    pipeline recipes copy tiny-cpu my.yaml
    """
    file = find_recipe(recipe)
    written = copy_recipe(file, destination, force=force)
    click.echo(f"wrote {written}, a copy of {file}")
    click.echo(f"next: edit it, then pipeline recipes validate {shlex.quote(str(written))}")


@command.command()
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1, shell_complete=complete_recipe)
@set_option
@json_option
def validate(recipes: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check recipes, all packaged ones if none is named, and print every fault. Exit code 2 if there is any.

    Judged are the file itself, the local folders that it names, and whether the release, the GPU, the formats and the
    split of the model exist together, as far as that is known without downloading anything.

    \b
    pipeline recipes validate my.yaml other.yaml
    """
    from pipeline.prepare import check_recipe_file

    errors: dict[str, InvalidInput] = {}
    findings: dict[str, tuple[Finding, ...]] = {}
    names = list(dict.fromkeys(recipes)) or list(packaged())
    for recipe in names:
        try:
            findings[recipe] = check_recipe_file(recipe, overrides)
        except InvalidInput as error:
            errors[recipe] = error
    if as_json:
        print_json([_verdict(recipe, errors.get(recipe), findings.get(recipe, ())) for recipe in names])
    else:
        for recipe in names:
            if recipe in errors:
                click.echo(str(errors[recipe]), err=True)
                continue
            click.echo(f"{recipe}: valid")
            for finding in findings[recipe]:
                click.echo(f"  {finding.severity}: {finding}")
    if errors:
        sys.exit(InvalidInput.exit_code)


def _verdict(recipe: str, error: InvalidInput | None, findings: Sequence[Finding]) -> dict[str, Any]:
    keys = ("where", "line", "key", "value", "problem", "fix", "rule")
    return {
        "recipe": recipe,
        "valid": error is None,
        "faults": [{key: getattr(fault, key) for key in keys} for fault in (error.faults if error else ())],
        "findings": [asdict(finding) for finding in findings],
    }


@command.command()
@click.argument("subject", metavar="[SUBJECT]", type=click.Choice(_SCHEMAS), default="recipe")
def schema(subject: str) -> None:
    """Print the JSON schema of recipes, or of another SUBJECT, for editors and programs.

    load, criteria and study are files for the options of these names; plan, bench and doctor are what these commands
    print with --json, and comparison is what `pipeline plan compare --json` prints.

    \b
    pipeline recipes schema > recipe.schema.json
    pipeline recipes schema load > load.schema.json
    """
    match subject:
        case "bench":
            from pipeline.bench.result import json_schema

            text = json_schema()
        case "comparison":
            from pipeline.cli.render.compared_options import schema_text as comparison_schema

            text = comparison_schema()
        case "plan":
            from pipeline.prepare.report_json import schema_text as plan_schema

            text = plan_schema()
        case "doctor":
            from pipeline.doctor.report import schema_text as doctor_schema

            text = doctor_schema()
        case "recipe":
            text = schema_text()
        case _:
            text = json.dumps(_settings_of(subject).model_json_schema(), indent=2) + "\n"
    click.echo(text, nl=False)


def _settings_of(option: str) -> type[Settings]:
    from pipeline.bench.compare.settings import CompareCriteria
    from pipeline.bench.load_settings import LoadSettings
    from pipeline.bench.tune.settings import StudySettings

    models: dict[str, type[Settings]] = {
        "load": LoadSettings,
        "criteria": CompareCriteria,
        "study": StudySettings,
    }
    return models[option]
