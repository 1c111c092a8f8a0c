"""`pipeline tune`: better values of a recipe, found by measuring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pipeline.bench.tune.settings import TuneSettings
from pipeline.cli.options import Verb, json_option, open_store, recipe_argument
from pipeline.cli.output import note, print_json, print_rich, reporter
from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault, InvalidInput
from pipeline.extras import missing
from pipeline.plan.settings import PreparationSettings

_PLANNED = "pipeline.tune.planned"  # key of click's `Context.meta`: recipe and plan


def _plan_faults(arguments: Mapping[str, Any], settings: TuneSettings) -> Iterator[Fault]:
    """Plan the search for the command, and yield what is wrong with its keys and files."""
    from pipeline.serving.deployments import recipe_of

    try:
        from pipeline.bench.tune.run import SearchPlan
        from pipeline.bench.tune.search_space import fixed_values
    except ImportError as error:
        raise missing("tuning", error, "bench") from error
    fixed = [value for _, value in fixed_values(settings.study.fix) if value]
    recipe = recipe_of(arguments["recipe"], (*arguments["overrides"], *fixed), open_store())
    try:
        plan = SearchPlan.of(recipe, settings, may_exist=arguments["dry_run"])
    except InvalidInput as error:
        yield from error.faults
    else:
        click.get_current_context().meta[_PLANNED] = (recipe, plan)


@click.command(name="tune", cls=Verb)
@recipe_argument
@options_of(TuneSettings, check=_plan_faults)
@options_of(PreparationSettings, "preparation")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the trials, how long they take, and what is tried with which values and why; build and serve nothing.",
)
@json_option
def command(
    settings: TuneSettings,
    preparation: PreparationSettings,
    dry_run: bool,
    as_json: bool,
    **_named: object,
) -> None:
    """Try values of RECIPE on a real server, and write the better ones as a new recipe beside it.

    The first trial is the recipe as it is; the next are what the plan forecasts best; then a model of the trials
    proposes. What the plan refuses is not built. The best trial is measured again beside the recipe, in turns, and
    recommended if it is clearly better; else the advice is to keep what there is. A search that was interrupted goes on
    where it was.

    \b
    pipeline tune tiny-cpu --set slo.itl_p95_ms=50
    pipeline tune my.yaml --load chat.yaml --study objective=throughput --study trials=8
    pipeline tune my.yaml --study draft_lengths=0-8 --dry-run
    pipeline tune llama-3.1-8b-fp8 --executor print; pipeline tune llama-3.1-8b-fp8 --adopt llama-3.1-8b-fp8-tune

    Exit code 0 also where the recipe is best as it is; 2 where the options are wrong.
    """
    from pipeline.bench.tune.page import report_lines, write_tune_page
    from pipeline.bench.tune.run import tune
    from pipeline.cli.render.tune import TrialLines, plan_lines, report_table, space_json, space_table
    from pipeline.machine.elsewhere import HandoverScript

    recipe, plan = click.get_current_context().meta[_PLANNED]
    if dry_run:
        shown = plan_lines(plan)
        if as_json:
            print_json({**shown, "space": space_json(plan.space)})
        else:
            click.echo("\n".join(f"{key:<11}{value}" for key, value in shown.items()))
            print_rich(space_table(plan.space), width=110)
        return
    progress = reporter(silent=as_json)
    lines = TrialLines(plan.space, plan.objectives, progress.say)
    result = tune(
        recipe,
        open_store(),
        settings,
        plan,
        progress,
        allowed=preparation.allowed,
        begin=lines.begin,
        watch=lines.show,
    )
    if isinstance(result, HandoverScript):
        if as_json:
            print_json({"script": str(result.path), "measures": result.names, "results": result.folder})
            return
        click.echo(str(result.path))
        count = len(result.names)
        note(f"{recipe.name}: run it where the recipe can be served, for {count} measurements; then")
        note("\n".join(f"next: {command} with the same options" for command in result.following))
        return
    for file in (Path(result.folder) / "report.html", *settings.outputs(".html")):
        write_tune_page(result, file)
    if as_json:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
        return
    print_rich(report_table(result))
    click.echo("\n".join(report_lines(result)))
