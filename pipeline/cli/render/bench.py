"""Output of `pipeline bench`: a live line of the load that is under way, the table of results, and a dry run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipeline.bench.conversations import BenchWorkload
from pipeline.bench.load import LoadRecords
from pipeline.bench.load_settings import Load, LoadSettings, section_argv
from pipeline.bench.result import BenchResult, Distribution, LevelResult, verdict, warnings
from pipeline.bench.run import Watcher
from pipeline.bench.settings import BenchSettings
from pipeline.bench.statistics import percentiles
from pipeline.bench.subject import Subject

_LINE_EVERY_S, _DRAW_EVERY_S = 5.0, 0.25
_LATEST = 200  # requests behind live figures
# Percentiles that have a column, and those that have one where there is room.
_COLUMNS = (("ttft", 50), ("ttft", 95), ("tpot", 50), ("itl", 95))
_WIDE_COLUMNS = (
    ("ttft", 50), ("ttft", 95), ("ttft", 99), ("tpot", 50), ("tpot", 95), ("itl", 95), ("itl", 99), ("total", 95),
)  # fmt: skip
_WIDE = 150

Ended = Callable[[LevelResult], None]


@contextmanager
def watching(settings: LoadSettings, *, quiet: bool) -> Iterator[tuple[Watcher | None, Ended | None]]:
    """Show the progress of a benchmark on standard error: live on a terminal, else a line every five seconds.

    Yields:
        Functions for `run_bench` to call while a load is under way, and when it is over; None if quiet.
    """
    if quiet:
        yield None, None
        return
    live = None
    if sys.stderr.isatty():
        console = Console(stderr=True, highlight=False)
        live = Live(console=console, auto_refresh=False, transient=True)
    every_s = _LINE_EVERY_S if live is None else _DRAW_EVERY_S
    next_s: dict[Load, float] = {}

    def watch(load: Load, records: LoadRecords, now_s: float) -> None:
        if now_s < next_s.setdefault(load, every_s):
            return
        next_s[load] = now_s + every_s
        line = _live_line(load, records, now_s, settings)
        if live is None:
            click.echo(line, err=True)
        else:
            live.update(Text(line), refresh=True)

    def ended(level: LevelResult) -> None:
        next_s.pop(level.load, None)
        line = f"{level.load}: {level.requests['complete']} answers, {_level_line(level)}"
        if live is None:
            click.echo(line, err=True)
        else:
            live.console.print(line)

    with live or nullcontext():
        yield watch, ended


def _live_line(load: Load, records: LoadRecords, now_s: float, settings: LoadSettings) -> str:
    """Progress of a load, and figures of its latest requests."""
    counted = records.counted[-_LATEST:]
    warm = not counted and now_s < settings.uncounted_s
    whole_s = None if settings.period_s is None else settings.period_s + settings.uncounted_s
    parts = [
        f"{load}:",
        f"{now_s:.0f}{'' if whole_s is None else f'/{whole_s:g}'} s{', warming up' if warm else ''},",
    ]
    parts.append(f"{records.flying} streams, {len(records.counted)} answers")
    if counted:
        since_s = max(now_s - min(request.sent_s for request in counted), 1e-9)
        tokens = sum(request.stats.output_tokens or request.stats.chunks for request in counted)
        parts.append(f"({len(counted) / since_s:.1f}/s, {tokens / since_s:,.0f} tokens/s)")
        for name, values in (
            ("TTFT", [request.ttft_ms for request in counted if request.ttft_ms is not None]),
            ("ITL", np.concatenate([request.itl_ms for request in counted])),
        ):
            if len(values):
                at = percentiles(values)
                parts.append(f"{name} p50 {_ms(at[50])} p95 {_ms(at[95])} ms")
    bad = sum(request.outcome in ("refused", "failed") for request in records.counted)
    return " ".join(parts) + (f", {bad} failed" if bad else "")


def _level_line(level: LevelResult) -> str:
    shown = [
        f"{name.upper()} p95 {_ms(level.latencies[name].p95)} ms"
        for name in ("ttft", "tpot")
        if name in level.latencies
    ]
    return ", ".join([f"{level.output_tokens_per_s:,.0f} {level.unit}/s", *shown])


def bench_table(result: BenchResult, width: int) -> Group:
    """Make the table of a run: a row for each load, with 95 % intervals; then verdicts and warnings."""
    columns = _WIDE_COLUMNS if width >= _WIDE else _COLUMNS
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("load", no_wrap=True)
    good = any(level.goodput_per_s is not None for level in result.levels)
    headings = [f"{name if name == 'total' else name.upper()} p{percent}" for name, percent in columns]
    unit = "tok/s" if all(level.unit == "tokens" for level in result.levels) else "chunks/s"
    closing = ("silent s", unit, "req/s", *(["goodput"] if good else []), "SLO")
    for heading in ("answers", "failed", *headings, "ITL max", *closing):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in result.levels:
        answered = level.requests["complete"] + level.requests["left"]
        failed = sum(level.requests.values()) - answered
        cells = [_cell(level.latencies.get(name), percent) for name, percent in columns]
        table.add_row(
            str(level.load),
            f"{answered:,}",
            f"[red]{failed:,}[/]" if failed else "0",
            *cells,
            _ms(level.latencies["itl"].max) if "itl" in level.latencies else "-",
            "-" if level.longest_silence_s is None else f"{level.longest_silence_s:.1f}",
            f"{level.output_tokens_per_s:,.1f}",
            f"{level.requests_per_s:,.2f}",
            *([_number(level.goodput_per_s)] if good else []),
            ("[green]met[/]" if level.within_slo else "[red]missed[/]") if level.slo else "-",
        )
    head = (
        f"{result.name} by its {result.target['way']}, {_asked(result)}; latencies in ms with 95 % intervals"
    )
    return Group(
        Text(head),
        table,
        *(Text(f"  {line}") for level in result.levels for line in _facts(level)),
        *(Text(line) for line in _verdicts(result)),
        Text(verdict(result)[1]),
        *(Text.from_markup(f"[yellow]warning:[/] {escape(line)}") for line in warnings(result)),
    )


def bench_plan(subject: Subject, settings: BenchSettings, workload: BenchWorkload) -> dict[str, Any]:
    """List what a benchmark would do; `takes` is how long at least."""
    load = settings.measured
    loads = [str(each) for each in load.loads]
    if settings.sweep_to is not None:
        loads = [f"from {loads[0]}, doubled until the SLO breaks or {settings.sweep_to:g} is reached"]
    prompts = ", ".join(
        f"{key} {value}" for key, value in workload.described().items() if value not in (None, 0, "", 1)
    )
    slo = {} if subject.slo is None else subject.slo.model_dump(exclude_none=True)
    return {
        "asks": f"{subject.name} at {subject.url}, by its {subject.way}, model {subject.model}",
        "loads": ", then ".join(loads),
        "prompts": prompts,
        "slo": ", ".join(f"{key} {value:g}" for key, value in slo.items()) or "none",
        "takes": _takes(load, workload, sweep=settings.sweep),
        "again": shlex.join(section_argv("--load", settings.load)) or "the default load",
    }


def _takes(settings: LoadSettings, workload: BenchWorkload, *, sweep: bool) -> str:
    seconds = []
    for load in settings.loads:
        bounds = [settings.period_s]
        bounds += [settings.requests / load.value] if load.kind == "rate" and settings.requests else [None]
        bounds += (
            [workload.span_s / load.value] if load.kind == "trace" and workload.span_s is not None else [None]
        )
        known = [bound for bound in bounds if bound is not None]
        if not known:
            return f"as long as {settings.requests} requests take, for each load"
        seconds.append(min(known) + (0.0 if load.kind == "trace" else settings.uncounted_s))
    each = "for each load; how many there are shows" if sweep else "in all"
    return f"{sum(seconds):.0f} s {each}, and until the last answers have come"


def _facts(level: LevelResult) -> Iterator[str]:
    """Yield a line with the server's own figures, if it has any."""
    facts = [
        f"{name} p50 {_ms(level.latencies[name].p50)} p95 {_ms(level.latencies[name].p95)} ms"
        for name in ("queue", "prefill")
        if name in level.latencies
    ]
    server = level.server
    if server.queue_mean_ms is not None and "queue" not in level.latencies:
        facts.append(f"queue of the gateway {_ms(server.queue_mean_ms)} ms on average")
    if server.kv_used_max is not None:
        facts.append(
            f"KV cache {server.kv_used_mean or 0.0:.0%} used on average, {server.kv_used_max:.0%} at most"
        )
    if server.waiting_max:
        facts.append(f"at most {server.waiting_max} requests waited")
    if level.acceptance is not None:
        facts.append(f"{level.acceptance:.0%} of the draft's tokens accepted")
    if level.cached_share:
        facts.append(f"{level.cached_share:.0%} of answers from the response cache")
    if facts:
        yield f"{level.load}: {', '.join(facts)}"


def _verdicts(result: BenchResult) -> Iterator[str]:
    for level in result.levels:
        for check in level.slo:
            name, percent = check.target.split("_")[:2]
            interval = level.latencies[name].intervals.get(percent) if name in level.latencies else None
            span = "" if interval is None else f" ({_ms(interval[0])} to {_ms(interval[1])})"
            close = interval is not None and interval[0] <= check.wanted <= interval[1]
            measured = "nothing measured" if check.measured is None else f"{_ms(check.measured)} ms{span}"
            yield (
                f"SLO {check.target} {check.wanted:g}, {level.load}: {measured}, "
                f"{'met' if check.met else 'missed'}{', but the interval holds both' if close else ''}"
            )


def _asked(result: BenchResult) -> str:
    workload = result.workload
    lengths = [
        f"{workload[key]} {key.partition('_')[0]} tokens"
        for key in ("prompt_tokens", "answer_tokens")
        if workload[key]
    ]
    return ", ".join([str(workload["source"]), *lengths])


def _cell(latency: Distribution | None, percent: int) -> str:
    if latency is None:
        return "-"
    interval = latency.intervals.get(f"p{percent}")
    span = "-" if interval is None else f"{_ms(interval[0])}-{_ms(interval[1])}"
    return f"{_ms(latency.at(percent))}\n[dim]{span}[/]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
