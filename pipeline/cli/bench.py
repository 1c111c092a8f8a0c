"""`pipeline bench`: figures of a deployment under load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from pipeline.bench.settings import BenchSettings
from pipeline.cli.options import Verb, complete_running, json_option, open_store
from pipeline.cli.output import is_quiet, note, output_width, print_rich, print_values
from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault, InvalidInput
from pipeline.extras import missing

_SLO_MISSED, _INTERRUPTED = 3, 130
_WIDTH = 180  # columns where standard output is no terminal


def _name_faults(arguments: Mapping[str, Any], settings: BenchSettings) -> Iterator[Fault]:
    if (arguments["name"] is None) == (settings.url is None):
        yield Fault("name a running deployment, or an address with --url: one of both")


@click.command(name="bench", cls=Verb)
@click.argument("name", required=False, shell_complete=complete_running)
@options_of(BenchSettings, check=_name_faults)
@json_option
@click.option("--dry-run", is_flag=True, help="Print the loads and how long they take; send nothing.")
def command(name: str | None, settings: BenchSettings, as_json: bool, dry_run: bool) -> None:
    """Measure the running deployment NAME, or the server at --url, under load.

    \b
    pipeline bench tiny-cpu --load concurrency=1,4,16
    pipeline bench tiny-cpu --load chat.yaml --load rate=2 --output tiny.json
    pipeline bench tiny-cpu --sweep --slo ttft_p95_ms=500 --output tiny.html
    pipeline bench --url http://gpu:8000 --model llama --tokenizer ./tokenizer --load prompt_tokens=1000~200

    Latencies count from when a request was due, so that an open loop hides nothing of a server that stalls. Ctrl-C ends
    a load early, and reports what was measured. Results go to standard output, progress to standard error.

    The exit code is 0; 3 where a load missed the SLO or more than --max-failed of its requests failed (with --sweep:
    where the first did); 2 where the options are wrong; 130 after Ctrl-C.
    """
    try:
        from pipeline.bench.conversations import BenchWorkload
        from pipeline.bench.run import run_bench
        from pipeline.bench.subject import find_subject
        from pipeline.cli.render.bench import bench_plan, bench_table, watching
        from pipeline.progress import Silent
    except ImportError as error:
        raise missing("measuring", error, "bench") from error
    subject, load = find_subject(name, settings, open_store()), settings.measured
    if settings.sweep and subject.slo is None:
        raise InvalidInput(
            "pipeline bench", [Fault("needs an SLO", key="--sweep", fix="the recipe has none: --slo KEY=MS")]
        )
    if dry_run:
        plan = bench_plan(subject, settings, BenchWorkload(subject, load))
        print_values(plan, as_json=as_json, form="{:<10}{}")
        return
    with watching(load, quiet=is_quiet() or as_json) as (watch, ended):
        result = run_bench(subject, load, Silent(), sweep_to=settings.sweep_to, watch=watch, ended=ended)
    for file in settings.output:
        if file.suffix == ".json":
            result.write(file)
        else:
            from pipeline.bench.page import write_page

            write_page(result, file)
    if as_json:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
    else:
        print_rich(bench_table(result, output_width(_WIDTH)), width=_WIDTH)
    for file in settings.output:
        note(f"written: {file}")
    if any(level.interrupted for level in result.levels):
        raise click.exceptions.Exit(_INTERRUPTED)
    judged = result.levels[:1] if settings.sweep else result.levels
    if not all(level.holds(settings.max_failed) for level in judged):
        raise click.exceptions.Exit(_SLO_MISSED)
