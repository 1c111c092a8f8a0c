"""`pipeline tune`: better values of a recipe, found by measuring."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.load import checked, file_option, load_faults, load_options, number, options_of
from pipeline.cli.options import allow_option, gpus_option, json_option, recipe_argument, store_option
from pipeline.cli.output import note, print_json, print_rich, reporter
from pipeline.errors import Fault, InvalidInput
from pipeline.extras import missing

if TYPE_CHECKING:
    from pipeline.bench.run import BenchOptions
    from pipeline.recipe import Recipe
    from pipeline.tuning.search import SearchOptions
    from pipeline.tuning.search_space import SearchSpace

_OBJECTIVES = ("goodput", "throughput", "latency")
_FIRST_SECONDS = 4.0


def _lengths(text: str) -> tuple[int, ...]:
    from pipeline.tuning.search_space import read_lengths

    return read_lengths(text)


@click.command(name="tune")
@recipe_argument
@store_option
@click.option(
    "--objective",
    "objectives",
    type=click.Choice(_OBJECTIVES),
    multiple=True,
    help="What is to be better, within the recipe's SLO: goodput (requests a second that meet it each by itself), "
    "throughput (tokens a second) or latency (of whole requests, p95, at the largest load). Given twice or more, "
    "trials are spread over the front of them, and the first decides.  [default: goodput; throughput without an SLO]",
)
@click.option(
    "--trials",
    callback=checked(number(1, 1000, whole=True)),
    default="12",
    show_default=True,
    metavar="N",
    help="Trials that are measured. A search that is there goes on to so many.",
)
@click.option(
    "--keys",
    multiple=True,
    metavar="KEY[,KEY…]",
    help="Try these only; by default all that the recipe's runtime reads.",
)
@click.option(
    "--fix",
    multiple=True,
    metavar="KEY[=VALUE]",
    help="Leave this one as the recipe has it, or at a value. May be repeated.",
)
@click.option(
    "--list-keys", is_flag=True, help="Print what would be tried, with which values, and why; try nothing."
)
@click.option(
    "--draft-lengths",
    callback=checked(_lengths),
    metavar="LOW-HIGH",
    help="Try the number of drafted tokens alone, such as 0-8 or 0,2,4 (0: no draft), and recommend one or none.",
)
@load_options
@click.option(
    "--rounds",
    callback=checked(number(0, 100, whole=True)),
    default="3",
    show_default=True,
    metavar="N",
    help="Pairs of rounds at the end, in which the best trial and the recipe as it is are measured in turns; 0: none, "
    "and nothing is recommended.",
)
@click.option(
    "--restart", is_flag=True, help="Forget the trials of this search; by default it goes on where it was."
)
@click.option(
    "--executor",
    type=click.Choice(["auto", "native", "docker", "print"]),
    default="auto",
    show_default=True,
    help="Who builds engines, as of pipeline build. print: write the trials as a script for another machine.",
)
@click.option(
    "--adopt",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Take in the figures that such a script left.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the tuned recipe goes; by default NAME-tuned.yaml beside the recipe.",
)
@click.option("--force", is_flag=True, help="Overwrite that file.")
@file_option("--report", "json", "Write all trials as JSON there, too.")
@file_option("--page", "html", "Write the page with the front there, too.")
@gpus_option
@allow_option
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option(
    "--dry-run", is_flag=True, help="Say what would be tried and how long it takes; build and serve nothing."
)
@json_option
@click.pass_context
def command(
    context: click.Context, /, recipe: str, overrides: tuple[str, ...], store: Path | None, **given: Any
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
    from pipeline.tuning.search_space import fixed_values
    from pipeline.tuning.tuned_recipe import tuned_file

    faults = [*load_faults(context, given), *_faults(given)]
    shelf = Store.at(store)
    fixed = list(fixed_values(given["fix"]))
    loaded = recipe_of(recipe, (*overrides, *(value for _, value in fixed if value)), shelf)
    space, more = _space(loaded, given, [key for key, _ in fixed])
    faults += more
    output = given["output"] or tuned_file(loaded)
    if output.exists() and not given["force"] and not given["list_keys"]:
        faults.append(
            Fault(
                "exists",
                key="--output",
                value=str(output),
                fix="give --force to overwrite it, or name another file",
            )
        )
    if faults or space is None:
        raise InvalidInput("pipeline tune", faults)
    try:
        from pipeline.cli.render.tune import plan_lines, space_table
    except ImportError as error:
        raise missing("tuning", error, "tune", "bench") from error
    if given["list_keys"]:
        if given["as_json"]:
            print_json(_space_json(space))
        else:
            print_rich(space_table(space), width=110)
        return
    bench = _bench(loaded, given)
    options = _search_options(space, bench, given)
    if given["dry_run"]:
        rounds = 2 * int(given["rounds"])
        plan = plan_lines(space, options, bench, rounds, _objectives(loaded, given), _FIRST_SECONDS)
        if given["as_json"]:
            print_json(plan)
        else:
            click.echo("\n".join(f"{key:<11}{value}" for key, value in plan.items()))
        return
    _run(loaded, shelf, space, bench, options, output, given)


def _run(
    recipe: Recipe,
    shelf: Any,
    space: SearchSpace,
    bench: BenchOptions,
    options: SearchOptions,
    output: Path,
    given: dict[str, Any],
) -> None:
    from pipeline.cli.render.tune import TrialLines, report_lines, report_table, write_tune_page
    from pipeline.runtimes import ExecutorChoice
    from pipeline.tuning.handover import hand_over, take_results
    from pipeline.tuning.search import search
    from pipeline.tuning.serving import DeploymentRunner
    from pipeline.tuning.study import open_study
    from pipeline.tuning.tune import conclude, question
    from pipeline.tuning.tuned_recipe import write_tuned

    progress = reporter(silent=given["as_json"])
    objectives, pairs = _objectives(recipe, given), int(given["rounds"])
    elsewhere = given["executor"] == "print" or given["adopt"] is not None
    machine = "another" if elsewhere else platform.node()
    asked = question(recipe, options, bench, machine)
    with open_study(
        shelf, recipe.name, asked, space, objectives, seed=bench.seed, restart=given["restart"]
    ) as study:
        lines = TrialLines(space, objectives, progress.say)
        runner = DeploymentRunner(
            recipe,
            space,
            shelf,
            bench,
            _FIRST_SECONDS,
            study.folder / "logs",
            progress,
            ExecutorChoice("auto" if elsewhere else given["executor"], devices=given["gpus"]),
            given["allowed"],
            given["offline"],
            given["gpus"],
        )
        if given["adopt"] is not None:
            taken = take_results(study, given["adopt"], recipe, options, pairs)
            progress.say(f"{recipe.name}: taken in: {', '.join(taken)}")
        if given["executor"] == "print":
            handed = hand_over(study, runner, recipe, options, bench, pairs)
            if handed is not None:
                if given["as_json"]:
                    print_json(
                        {"script": str(handed.script), "measures": handed.names, "results": handed.results}
                    )
                    return
                click.echo(str(handed.script))
                note(
                    f"{recipe.name}: run it where the recipe can be served, for {len(handed.names)} measurements; then"
                )
                note(f"next: pipeline tune … --adopt {handed.results} with the same options")
                return
        if not elsewhere:
            runner.require_stopped()
            lines.begin(study.records())
            search(study, runner, options, lines.show)
        report = conclude(
            study, recipe, options, pairs=pairs, runner=None if elsewhere else runner, say=progress.say
        )
        if report.recommendation.verdict == "tuned":
            report = write_tuned(recipe, report, output, force=given["force"])
        for file in filter(None, (study.folder / "report.json", given["report"])):
            file.write_text(report.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        for file in filter(None, (study.folder / "report.html", given["page"])):
            write_tune_page(report, file)
    if given["as_json"]:
        click.echo(report.model_dump_json(by_alias=True, indent=2))
        return
    print_rich(report_table(report))
    click.echo("\n".join(report_lines(report)))


def _space(recipe: Recipe, given: dict[str, Any], fixed: list[str]) -> tuple[SearchSpace | None, list[Fault]]:
    """What is tried, and what is wrong with the options that say so."""
    from pipeline.tuning.search_space import draft_lengths, search_space

    keys = [key.strip() for word in given["keys"] for key in word.split(",")]
    try:
        if given["draft_lengths"]:
            return draft_lengths(recipe, given["draft_lengths"]), []
        return search_space(recipe, keys, fixed), []
    except InvalidInput as error:
        return None, list(error.faults)


def _objectives(recipe: Recipe, given: dict[str, Any]) -> tuple[Any, ...]:
    judged = recipe.slo.ttft_p95_ms is not None or recipe.slo.itl_p95_ms is not None
    return tuple(dict.fromkeys(given["objectives"])) or ("goodput" if judged else "throughput",)


def _bench(recipe: Recipe, given: dict[str, Any]) -> BenchOptions:
    """How trials are measured: by default with the questions that the recipe is calibrated for."""
    chosen = dict(given)
    if not (given["concurrency"] or given["rate"] or given["trace"]):
        most = recipe.limits.max_concurrency
        chosen["concurrency"] = tuple(sorted({most, max(1, most // 2), max(1, most // 4)}))
    random_words = given["prompts"] or given["prompt_tokens"] or given["trace"] or given["prefix_tokens"]
    if not random_words and recipe.quantization.calibration is not None:
        chosen["prompts"] = "calibration"
    return options_of(chosen)


def _search_options(space: SearchSpace, bench: BenchOptions, given: dict[str, Any]) -> SearchOptions:
    from pipeline.tuning.search import SearchOptions
    from pipeline.tuning.tune import lengths_of

    return SearchOptions(
        loads=tuple(sorted(bench.loads, key=lambda load: -load.value)),
        trials=int(given["trials"]),
        sweep=lengths_of(space) if given["draft_lengths"] else (),
        ahead=given["executor"] == "print" or given["adopt"] is not None,
    )


def _space_json(space: SearchSpace) -> dict[str, Any]:
    tried = [
        {
            "key": one.key,
            "values": one.values,
            "own": one.own,
            "another_engine": one.compiled,
            "reason": one.reason,
        }
        for one in space.dimensions
    ]
    return {"keys": tried, "combinations": space.size, "left_out": dict(space.left_out)}


def _faults(given: dict[str, Any]) -> list[Fault]:
    """What is wrong with options that are right each by itself."""
    faults = []
    if given["draft_lengths"]:
        faults += [
            Fault("goes without --draft-lengths, which tries one key alone", key=f"--{one}")
            for one in ("keys", "fix")
            if given[one]
        ]
    if given["adopt"] is not None and given["restart"]:
        faults.append(Fault("forgets the trials that --adopt has figures of", key="--restart"))
    if given["report"] and not os.access(given["report"].absolute().parent, os.W_OK):
        faults.append(Fault("its folder cannot be written to", key="--report", value=str(given["report"])))
    return faults
