"""`pipeline plan`: know before you build. Its verbs compare deployments, and calibrate and check the forecast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import (
    VerbGroup,
    complete_recipe,
    json_option,
    open_store,
    recipe_argument,
    set_option,
)
from pipeline.cli.output import note
from pipeline.cli.settings_options import options_of
from pipeline.errors import SloMissed, UserError
from pipeline.plan.settings import CompareSettings, PlanSettings

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_ROWS = 15  # options that are printed


class _CommandWithVerbs(VerbGroup):
    """A command with verbs beside its plain form: `plan RECIPE` and `plan compare RECIPE`."""

    allow_extra_args = False
    allow_interspersed_args = True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        verb = self.commands.get(args[0]) if args else None
        if verb is None:
            return super().make_context(info_name, args, parent, **extra)
        return verb.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx) if ctx.command is self else ctx.command.invoke(ctx)


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    verbs = [CompletionItem(name) for name in command.commands if name.startswith(incomplete)]
    return [*verbs, *complete_recipe(context, parameter, incomplete)]


@click.group(name="plan", cls=_CommandWithVerbs, no_args_is_help=False, subcommand_metavar="| COMMAND …")
@click.argument("recipe", metavar="RECIPE", shell_complete=_complete)
@set_option
@options_of(PlanSettings)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: every figure with its formula and its sources."
)
def command(recipe: str, overrides: tuple[str, ...], settings: PlanSettings, as_json: bool) -> None:
    """Say what RECIPE comes to before anything is made: whether it fits into memory, how fast it will be, what
    `pipeline build` would make, and what is wrong. Only config.json and the headers of models that are not known are
    downloaded.

    Exit code 2 if it does not fit, or a build would be refused; 4 if it misses its SLO.

    \b
    pipeline plan llama-3.1-8b-fp8
    pipeline plan llama-3.1-8b-fp8 --prompt-tokens 1000 --output-tokens 300 --rate 20 --output sized.yaml
    pipeline plan llama-3.3-70b-fp8 --set runtime.gpu=h200-sxm-141g --set runtime.tensor_parallel=2
    pipeline plan tiny-cpu --json
    pipeline plan llama-3.3-70b-fp8 --prompt-tokens 1000 --output-tokens 500 --price h100-sxm=2.5
    pipeline plan llama-3.1-8b-eagle3 --acceptance 0.8
    """
    from pipeline.cli.render.memory import OutputStyle
    from pipeline.cli.render.plan import document, page
    from pipeline.prepare.calibrations import stored_calibration
    from pipeline.prepare.report import make_report
    from pipeline.prepare.sizing import sized_recipe
    from pipeline.recipe.catalog import write_recipe
    from pipeline.serving.deployments import recipe_of

    artifacts = open_store()
    chosen = recipe_of(recipe, overrides, artifacts)
    file = settings.calibration if isinstance(settings.calibration, Path) else None
    calibration = None if settings.calibration == "none" else stored_calibration(chosen, artifacts, file)
    outlook = make_report(chosen, artifacts, workload=settings, calibration=calibration)
    click.echo(document(outlook, artifacts) if as_json else page(outlook, artifacts, OutputStyle.of_output()))
    if outlook.refused:
        sys.exit(UserError.exit_code)
    if settings.output is not None:
        text = sized_recipe(outlook, settings.output.absolute().parent)
        write_recipe(text, settings.output, force=False)
        note(
            f"wrote {settings.output}; next: pipeline deploy {settings.output} --target kubernetes --output cluster"
        )
    if outlook.meets_slo is False:
        sys.exit(SloMissed.exit_code)


@command.command()
@recipe_argument
@options_of(CompareSettings)
@json_option
def compare(recipe: str, overrides: tuple[str, ...], settings: CompareSettings, as_json: bool) -> None:
    """Rank GPUs, splits, formats and drafts for RECIPE's SLO.

    Those that serve within it are ranked by price, or by GPU time without prices; the others have the reason why not.
    The front of time between tokens and price is drawn below the table, and into a file by --output.

    \b
    pipeline plan compare llama-3.3-70b-fp8 --price h100-sxm=2.5 --price h200=3.5 --output front.html
    """
    from pipeline.cli.render.compared_options import comparison_lines, comparison_text
    from pipeline.cli.render.front import front_lines, front_page, front_png, require_matplotlib
    from pipeline.cli.render.memory import OutputStyle
    from pipeline.prepare.report import compare_recipe
    from pipeline.serving.deployments import recipe_of
    from pipeline.store import human_bytes

    is_png = settings.output is not None and settings.output.suffix == ".png"
    if is_png:
        # Comparing takes a while; what is missing is said before.
        require_matplotlib()
    artifacts = open_store()
    comparison = compare_recipe(recipe_of(recipe, overrides, artifacts), artifacts, settings)
    if settings.output is not None:
        settings.output.write_bytes(front_png(comparison) if is_png else front_page(comparison).encode())
        note(f"wrote {settings.output}, {human_bytes(settings.output.stat().st_size)}")
    if as_json:
        click.echo(comparison_text(comparison))
        return
    lines = [
        *comparison_lines(comparison, rows=_ROWS),
        "",
        *front_lines(comparison, OutputStyle.of_output().width),
    ]
    click.echo("\n".join(line.rstrip() for line in lines))


@command.command()
@recipe_argument
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="BENCH.json…"
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    help="Write the constants there instead of into the store; `pipeline plan --calibration FILE.yaml` takes them.",
)
@json_option
def calibrate(
    recipe: str,
    overrides: tuple[str, ...],
    files: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Fit the forecast to loads that `pipeline bench` measured.

    The constants of RECIPE's GPU and runtime, or of this machine's processor, are fitted to files of `pipeline bench
    RECIPE --output BENCH.json`, and kept. From then on `pipeline plan` takes them for every recipe of the same. Loads
    that the load generator may have limited, or that stalled, are not used.

    Constants that forecast half the figures of loads left out of the fit worse than before are not kept: exit code 1.

    \b
    pipeline plan calibrate llama-3.1-8b-fp8 bench-1.json bench-2.json
    """
    from pipeline.bench.forecast import calibrate_recipe
    from pipeline.cli.render.forecast_errors import calibration_json, calibration_lines
    from pipeline.cli.render.memory import OutputStyle
    from pipeline.prepare.calibrations import calibration_path
    from pipeline.serving.deployments import recipe_of

    if output is not None and output.suffix != ".yaml":
        raise UserError(f"--output = {output}: must end in .yaml")
    artifacts = open_store()
    chosen = recipe_of(recipe, overrides, artifacts)
    calibration = calibrate_recipe(chosen, artifacts, tuple(dict.fromkeys(files)))
    path = output or (calibration_path(chosen, artifacts) if calibration.helps else None)
    if path is not None:
        calibration.fit.calibration.write(path)
    if as_json:
        click.echo(calibration_json(calibration, path))
    else:
        click.echo("\n".join(calibration_lines(calibration, path, OutputStyle.of_output().width)))
    if path is None:
        sys.exit(1)


@command.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER…",
)
@json_option
def models(folders: tuple[Path, ...], as_json: bool) -> None:
    """List what published checkpoints hold, by their config.json and hf_quant_config.json.

    FOLDER is a checkpoint, or holds folders of checkpoints. For each: parameters in all and active, bytes of weights by
    format, and bytes that are kept of a token and of a sequence; in brackets what its name or its index says.

    Where the safetensors are there, their headers and small scales are checked against the settings: tensors and
    scales that are missing, scales that are zero, types that the algorithm does not have, an index that differs.

    Exit code 2 if one of them cannot be read or has errors; the output says why.

    \b
    pipeline plan models checkpoints
    """
    from pipeline.cli.render.checkpoints import models_json, models_lines
    from pipeline.plan.checkpoint_summary import summaries

    models = summaries(folders)
    click.echo(models_json(models) if as_json else "\n".join(models_lines(models)))
    if any(model.is_broken for model in models):
        sys.exit(UserError.exit_code)


@command.command()
@json_option
def accuracy(as_json: bool) -> None:
    """Compare the forecasts of memory and speed with measurements.

    All of them were published by others; the output names the sources.

    \b
    pipeline plan accuracy
    """
    from pipeline.cli.render.forecast_errors import accuracy_page

    click.echo(accuracy_page(as_json=as_json))
