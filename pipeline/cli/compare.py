"""`pipeline compare`: is B slower than A, and does it answer worse?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pipeline.bench.compare.settings import CompareSettings, source_faults, source_kind
from pipeline.cli.options import Verb, complete_running, json_option
from pipeline.cli.output import is_quiet, note, print_json, print_rich, reporter
from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault
from pipeline.extras import missing

_OVER_BUDGET, _INTERRUPTED = 3, 130
_WIDTH = 130


def _source_faults(arguments: Mapping[str, Any], settings: CompareSettings) -> Iterator[Fault]:
    return source_faults((arguments["a"], arguments["b"]), settings)


@click.command(name="compare", cls=Verb)
@click.argument("a", shell_complete=complete_running)
@click.argument("b", shell_complete=complete_running)
@options_of(CompareSettings, check=_source_faults)
@json_option
@click.option(
    "--dry-run", is_flag=True, help="Print the rounds and how long they take; start and send nothing."
)
def command(a: str, b: str, settings: CompareSettings, as_json: bool, dry_run: bool) -> None:
    """Compare B with A: two results of `pipeline bench --output`, two running deployments, or two packages.

    \b
    pipeline compare before.json after.json --max-regression 0.05
    pipeline compare chat-fp8 chat-fp4 --concurrency 8 --rounds 10 --page difference.html
    pipeline compare /srv/package-1 /srv/package-2 --min-similar 0.9 --max-perplexity-increase 0.02
    pipeline compare chat-fp8 chat-fp4 --rounds 0 --questions mine.jsonl --judge https://api.example.com --judge-model x

    Both get the same load with the same seeds, in turns. A figure is called better or worse only if that is not noise:
    a package that is compared with itself is called worse in less than one comparison of twenty, whatever figure it
    would be. Golden questions go to Triton itself, greedily. Packages are served for as long as the comparison takes.

    Budgets that are not given are those of the golden questions. Ctrl-C ends it with what three rounds or more have
    shown. The exit code is 0; 3 where a figure is over a budget; 2 where the options are wrong, or two stored runs did
    not ask the same; 130 after Ctrl-C.
    """
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
        result = compare_files(Path(a), Path(b), settings.threshold, settings.max_regression)
    else:
        first, second = find_source(a, settings), find_source(b, settings)
        golden, judge = golden_questions(settings, first, second), answer_judge(settings)
        if dry_run:
            plan = comparison_plan(first, second, settings, golden)
            if as_json:
                print_json(plan)
            else:
                click.echo("\n".join(f"{key:<10}{value}" for key, value in plan.items()))
            return
        result = compare_deployments(
            first,
            second,
            settings,
            reporter(silent=is_quiet() or as_json),
            golden=golden,
            judge=judge,
        )
    if settings.output:
        result.write(settings.output)
    if settings.page:
        from pipeline.bench.compare.page import write_compare_page

        write_compare_page(result, settings.page)
    for path in filter(None, (settings.output, settings.page)):
        note(f"written: {path}")
    if as_json:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
    else:
        print_rich(*compare_lines(result), width=_WIDTH)
    if result.interrupted:
        raise click.exceptions.Exit(_INTERRUPTED)
    if not result.passed:
        raise click.exceptions.Exit(_OVER_BUDGET)
