"""`pipeline plan`: know before you build; with --compare, deployments side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, complete_recipe, open_store, set_option
from pipeline.cli.output import note
from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.plan.settings import PlanSettings

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.store import Store

_ROWS = 15  # options that are printed


@click.command(name="plan", cls=Verb)
@click.argument("recipe", metavar="RECIPE", required=False, shell_complete=complete_recipe)
@set_option
@options_of(PlanSettings)
@click.argument(
    "more_files", nargs=-1, type=click.Path(dir_okay=False, path_type=Path), metavar="[BENCH.json]…"
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: every figure with its formula and its sources."
)
@click.option(
    "--accuracy",
    is_flag=True,
    help="Compare the models of memory and speed with published measurements; needs no RECIPE.",
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of what --json prints; needs no RECIPE.")
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    settings: PlanSettings,
    more_files: tuple[Path, ...],
    as_json: bool,
    accuracy: bool,
    schema: bool,
) -> None:
    """Say what RECIPE comes to before anything is made: whether it fits into memory, what `pipeline build` would make,
    and what speaks against it. Nothing is downloaded but the config.json and the headers of models that are not known.

    Exit code 2 if it does not fit, or a build would be refused.

    \b
    pipeline plan llama-3.1-8b-fp8
    pipeline plan llama-3.3-70b-fp8 --gpu h200-sxm-141g --set runtime.tensor_parallel=2
    pipeline plan tiny-cpu --json
    pipeline plan llama-3.3-70b-fp8 --prompt-tokens 1000 --output-tokens 500 --acceptance 0.8 --price h100-sxm=2.5
    pipeline plan llama-3.3-70b-fp8 --compare --price h100-sxm=2.5 --price h200=3.5 --output front.html
    pipeline plan llama-3.3-70b-fp8 --calibrate-from bench-1.json bench-2.json
    pipeline plan --accuracy
    """
    from pipeline.cli.render.compared_options import schema_text as comparison_schema
    from pipeline.cli.render.forecast_errors import accuracy_page
    from pipeline.cli.render.memory import Look
    from pipeline.cli.render.plan import document, page
    from pipeline.prepare.report import make_report, stored_calibration
    from pipeline.prepare.report_json import schema_text
    from pipeline.serving.deployments import recipe_of

    if schema:
        click.echo(comparison_schema() if settings.compare else schema_text().rstrip("\n"))
        return
    if accuracy:
        click.echo(accuracy_page(as_json=as_json))
        return
    if recipe is None:
        raise UserError("name a RECIPE (pipeline recipes ls), or give --accuracy or --schema")
    if more_files and not settings.calibrate_from:
        extra = " ".join(map(str, more_files))
        raise InvalidInput("command line", [Fault("is one word too many: name one RECIPE", value=extra)])
    if settings.gpu is not None:
        overrides = (f"runtime.gpu={settings.gpu}", *overrides)
    artifacts, look = open_store(), Look.of_output()
    chosen = recipe_of(recipe, overrides, artifacts)
    if settings.compare:
        click.echo(compare_page(chosen, artifacts, settings, as_json=as_json, width=look.width))
        return
    if settings.calibrate_from:
        files = tuple(dict.fromkeys((*settings.calibrate_from, *more_files)))
        click.echo(
            calibrate_page(chosen, artifacts, files, settings.output, as_json=as_json, width=look.width)
        )
        return
    calibration = (
        None if settings.no_calibration else stored_calibration(chosen, artifacts, settings.calibration)
    )
    outlook = make_report(
        chosen, artifacts, allowed=settings.allowed, workload=settings,
        calibration=calibration,
    )  # fmt: skip
    until = settings.until
    if outlook.plan is not None and until not in outlook.plan:
        raise UserError(f"no step {until!r}; this build has {', '.join(step.name for step in outlook.plan)}")
    click.echo(document(outlook, artifacts, until) if as_json else page(outlook, artifacts, until, look))
    if outlook.refused:
        sys.exit(UserError.exit_code)


def compare_page(recipe: Recipe, store: Store, settings: PlanSettings, *, as_json: bool, width: int) -> str:
    """Write the front to `--output`, and return what `--compare` prints."""
    from pipeline.cli.render.compared_options import comparison_lines, comparison_text
    from pipeline.cli.render.front import front_lines, front_page, front_png, require_matplotlib
    from pipeline.prepare.report import compare_recipe
    from pipeline.store import human_bytes

    is_png = settings.output is not None and settings.output.suffix == ".png"
    if is_png:
        # Comparing takes a while; what is missing is said before.
        require_matplotlib()
    found = compare_recipe(recipe, store, settings)
    if settings.output is not None:
        settings.output.write_bytes(front_png(found) if is_png else front_page(found).encode())
        note(f"wrote {settings.output}, {human_bytes(settings.output.stat().st_size)}")
    if as_json:
        return comparison_text(found)
    lines = [*comparison_lines(found, rows=_ROWS), "", *front_lines(found, width)]
    return "\n".join(line.rstrip() for line in lines)


def calibrate_page(
    recipe: Recipe, store: Store, files: tuple[Path, ...], output: Path | None, *, as_json: bool, width: int
) -> str:
    """Write fitted constants to `--output` or into the store, and return what `--calibrate-from` prints."""
    from pipeline.bench.forecast import calibrate_recipe
    from pipeline.cli.render.forecast_errors import calibration_json, calibration_lines
    from pipeline.prepare.report import calibration_path

    found = calibrate_recipe(recipe, store, files)
    path = output or calibration_path(recipe, store)
    found.fit.calibration.write(path)
    return calibration_json(found, path) if as_json else "\n".join(calibration_lines(found, path, width))
