"""`pipeline bench`: what a deployment does under load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from pipeline.cli.load import checked, file_option, load_faults, load_options, number, options_of
from pipeline.cli.options import complete_running, json_option
from pipeline.cli.output import is_quiet, note, output_width, print_json, print_rich
from pipeline.cli.subject import find_subject, subject_faults, subject_options
from pipeline.errors import Fault, InvalidInput
from pipeline.extras import missing

_SLO_MISSED, _INTERRUPTED = 3, 130
_WIDTH = 180  # columns where standard output is no terminal


@click.command(name="bench")
@click.argument("name", required=False, shell_complete=complete_running)
@subject_options
@load_options
@click.option("--sweep", is_flag=True, help="Double the load until the SLO breaks, then narrow down where.")
@click.option(
    "--most",
    callback=checked(number(0, above=True)),
    metavar="N",
    help="With --sweep: end there.  [default: 1024]",
)
@click.option(
    "--max-failed",
    callback=checked(number(0, 1)),
    default="0.01",
    show_default=True,
    metavar="SHARE",
    help="Share of requests that may fail before the exit code is 3.",
)
@json_option
@file_option("--output", "json", "Write the result as JSON.")
@file_option("--page", "html", "Write the result as one HTML page.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the result instead.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and how long it takes; send nothing.")
@click.pass_context
def command(context: click.Context, /, name: str | None, **given: Any) -> None:
    """Measure the running deployment NAME, or the server at --url, under load.

    \b
    pipeline bench tiny-cpu --concurrency 1,4,16
    pipeline bench tiny-cpu --sweep --slo ttft_p95_ms=500 --page tiny.html
    pipeline bench tiny-cpu --rate 2 --prompts calibration --duration 60 --output tiny.json
    pipeline bench --url http://gpu:8000 --model llama --tokenizer ./tokenizer --prompt-tokens 1000~200

    Latencies count from when a request was due, so that an open loop hides nothing of a server that stalls. Ctrl-C ends
    a load early, and reports what was measured. Results go to standard output, progress to standard error.

    The exit code is 0; 3 where a load missed the SLO or more than --max-failed of its requests failed (with --sweep:
    where the first did); 2 where the options are wrong; 130 after Ctrl-C.
    """
    if given["schema"]:
        from pipeline.bench.result import json_schema

        click.echo(json_schema(), nl=False)
        return
    faults = [*subject_faults(name, given), *load_faults(context, given), *_sweep_faults(given)]
    if faults:
        raise InvalidInput("pipeline bench", faults)
    try:
        from pipeline.bench.run import BenchWorkload, run_bench
        from pipeline.bench.sweep import holds
        from pipeline.cli.render.bench import bench_plan, bench_table, watching
        from pipeline.progress import Silent
    except ImportError as error:
        raise missing("measuring", error, "bench") from error
    options = options_of(given)
    if given["sweep"]:
        loads = (
            options.loads if given["concurrency"] or given["rate"] else (replace(options.loads[0], value=1),)
        )
        options = replace(options, loads=loads, sweep=True, most=given["most"] or 1024)
    subject = find_subject(name, given)
    if options.sweep and subject.slo is None:
        raise InvalidInput(
            "pipeline bench", [Fault("needs an SLO", key="--sweep", fix="the recipe has none: --slo KEY=MS")]
        )
    if given["dry_run"]:
        plan = bench_plan(subject, options, BenchWorkload(subject, options))
        if given["as_json"]:
            print_json(plan)
        else:
            click.echo("\n".join(f"{key:<10}{value}" for key, value in plan.items()))
        return
    with watching(options, quiet=is_quiet() or given["as_json"]) as (watch, ended):
        result = run_bench(subject, options, Silent(), watch=watch, ended=ended)
    if given["output"]:
        result.write(given["output"])
    if given["page"]:
        from pipeline.bench.page import write_page

        write_page(result, given["page"])
    if given["as_json"]:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
    else:
        print_rich(bench_table(result, output_width(_WIDTH)), width=_WIDTH)
    for path in (given["output"], given["page"]):
        if path:
            note(f"written: {path}")
    if any(level.interrupted for level in result.levels):
        raise click.exceptions.Exit(_INTERRUPTED)
    judged = result.levels[:1] if options.sweep else result.levels
    if not all(holds(level, given["max_failed"]) for level in judged):
        raise click.exceptions.Exit(_SLO_MISSED)


def _sweep_faults(given: dict[str, Any]) -> list[Fault]:
    faults = []
    if given["most"] and not given["sweep"]:
        faults.append(Fault("goes with --sweep only", key="--most"))
    if given["sweep"]:
        faults += [Fault("a trace has one load", key="--sweep")] if given["trace"] else []
        faults += [
            Fault("begins with one load and finds the others", key=f"--{one}", fix="name one, or none")
            for one in ("concurrency", "rate")
            if len(given[one] or ()) > 1
        ]
    return faults
