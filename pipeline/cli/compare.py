"""`pipeline compare`: is B slower than A, and does it answer worse?"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.bench.compare.settings import CompareSettings, source_faults, source_kind
from pipeline.cli.options import Verb, complete_running, json_option, open_store
from pipeline.cli.output import is_quiet, note, print_rich, print_values, reporter
from pipeline.cli.settings_options import options_of
from pipeline.extras import missing

_EXIT_CODES = {"kept": 0, "over": 3, "not shown": 4}
_INTERRUPTED = 130
_WIDTH = 130


@click.command(name="compare", cls=Verb)
@click.argument("a", shell_complete=complete_running)
@click.argument("b", shell_complete=complete_running)
@options_of(
    CompareSettings,
    check=lambda arguments, settings: source_faults((arguments["a"], arguments["b"]), settings),
)
@json_option
@click.option(
    "--dry-run", is_flag=True, help="Print the rounds and how long they take; start and send nothing."
)
def command(a: str, b: str, settings: CompareSettings, as_json: bool, dry_run: bool) -> None:
    """Compare B with A: two results of `pipeline bench --output`, running deployments, packages, or addresses.

    \b
    pipeline compare before.json after.json --criteria max_regression=0.05
    pipeline compare chat-fp8 chat-fp4 --load concurrency=8 --criteria rounds=10 --output difference.html
    pipeline compare /srv/package-1 /srv/package-2 --load chat.yaml --criteria release.yaml
    pipeline compare chat-fp8 chat-fp4 --criteria rounds=0 --criteria questions=mine.jsonl
    pipeline compare http://gpu-1:8000 http://gpu-2:8000#llama --tokenizer ./tokenizer --load rate=2

    Both get the same load with the same seeds, in turns. A figure is called better or worse only if that is not noise:
    compared with itself, a package is called worse, by any of its figures, in fewer than one comparison of twenty.
    Golden questions go to Triton itself, greedily. Packages are served for as long as the comparison takes.

    Budgets that are not given are those of the golden questions. Ctrl-C ends it with what three rounds or more have
    shown. The exit code is 0 where all budgets are shown to be kept; 3 where one is over; 4 where one is not shown to
    be either, so that more rounds (--criteria most_rounds=24) or a longer run are needed; 2 where the options are
    wrong, or two stored runs did not ask the same; 130 after Ctrl-C.
    """
    run_comparison(a, b, settings, as_json=as_json, dry_run=dry_run)


def run_comparison(a: str, b: str, settings: CompareSettings, *, as_json: bool, dry_run: bool) -> None:
    """Compare two results, deployments or packages, and print what was found; exits as the command does."""
    try:
        from pipeline.bench.compare.run import compare_deployments, compare_files, comparison_plan
        from pipeline.bench.compare.sources import (
            answer_judge,
            find_source,
            golden_questions,
        )
        from pipeline.cli.render.compare import compare_lines
    except ImportError as error:
        raise missing("comparing", error, "bench") from error
    if source_kind(a) == "file":
        result = compare_files(Path(a), Path(b), settings.criteria)
    else:
        first, second = (find_source(name, settings, open_store()) for name in (a, b))
        golden, judge = golden_questions(settings.criteria, first, second), answer_judge(settings.criteria)
        if dry_run:
            plan = comparison_plan(first, second, settings, golden)
            print_values(plan, as_json=as_json, form="{:<10}{}")
            return
        result = compare_deployments(
            first,
            second,
            settings,
            reporter(silent=is_quiet() or as_json),
            golden=golden,
            judge=judge,
        )
    for file in settings.output:
        if file.suffix == ".json":
            result.write(file)
        else:
            from pipeline.bench.compare.page import write_compare_page

            write_compare_page(result, file)
        note(f"written: {file}")
    if as_json:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
    else:
        print_rich(*compare_lines(result), width=_WIDTH)
    if result.interrupted:
        raise click.exceptions.Exit(_INTERRUPTED)
    if code := _EXIT_CODES[result.state]:
        raise click.exceptions.Exit(code)
