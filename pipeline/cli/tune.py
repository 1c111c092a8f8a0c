"""`pipeline tune`: better values of a recipe, found by measuring."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.bench.tune.settings import TuneSettings
from pipeline.cli.options import allow_option, json_option, recipe_argument, store_option
from pipeline.cli.output import note, print_json, print_rich, reporter
from pipeline.cli.settings_options import options_of
from pipeline.extras import missing


@click.command(name="tune")
@recipe_argument
@store_option
@options_of(TuneSettings)
@allow_option
@click.option(
    "--list-keys", is_flag=True, help="Print what would be tried, with which values, and why; try nothing."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the trials and how long they take; build and serve nothing."
)
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    settings: TuneSettings,
    allowed: frozenset[str],
    list_keys: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Try values of RECIPE on a real server, and write the better ones as a new recipe beside it.

    The first trial is the recipe as it is; the next are what the plan forecasts best; then Optuna proposes. What the
    plan refuses is not built. The best trial is measured again beside the recipe, in turns, and recommended if it is
    clearly better; else the advice is to keep what there is. A search that was interrupted goes on where it was.

    \b
    pipeline tune tiny-cpu --set slo.itl_p95_ms=50
    pipeline tune my.yaml --objective throughput --keys limits.max_concurrency,limits.max_batch_tokens --trials 8
    pipeline tune my.yaml --draft-lengths 0-8
    pipeline tune llama-3.1-8b-fp8 --executor print; pipeline tune llama-3.1-8b-fp8 --adopt llama-3.1-8b-fp8-tune

    Exit code 0 also where the recipe is best as it is; 2 where the options are wrong.
    """
    from pipeline.serving.deployments import recipe_of
    from pipeline.store import Store

    try:
        from pipeline.bench.tune.handover import HandedOverTrials
        from pipeline.bench.tune.page import report_lines, write_tune_page
        from pipeline.bench.tune.run import SearchPlan, tune
        from pipeline.bench.tune.search_space import fixed_values
        from pipeline.cli.render.tune import TrialLines, plan_lines, report_table, space_json, space_table
    except ImportError as error:
        raise missing("tuning", error, "tune", "bench") from error
    artifacts = Store.at(store)
    fixed = [value for _, value in fixed_values(settings.fix) if value]
    loaded = recipe_of(recipe, (*overrides, *fixed), artifacts)
    plan = SearchPlan.of(loaded, settings, may_exist=list_keys)
    if list_keys:
        if as_json:
            print_json(space_json(plan.space))
        else:
            print_rich(space_table(plan.space), width=110)
        return
    if dry_run:
        shown = plan_lines(plan)
        if as_json:
            print_json(shown)
        else:
            click.echo("\n".join(f"{key:<11}{value}" for key, value in shown.items()))
        return
    progress = reporter(silent=as_json)
    lines = TrialLines(plan.space, plan.objectives, progress.say)
    result = tune(
        loaded, artifacts, settings, plan, progress, allowed=allowed, begin=lines.begin, watch=lines.show
    )
    if isinstance(result, HandedOverTrials):
        if as_json:
            print_json({"script": str(result.script), "measures": result.names, "results": result.results})
            return
        click.echo(str(result.script))
        note(
            f"{loaded.name}: run it where the recipe can be served, for {len(result.names)} measurements; then"
        )
        note(f"next: pipeline tune … --adopt {result.results} with the same options")
        return
    for file in filter(None, (Path(result.folder) / "report.html", settings.page)):
        write_tune_page(result, file)
    if as_json:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
        return
    print_rich(report_table(result))
    click.echo("\n".join(report_lines(result)))
