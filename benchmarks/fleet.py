"""A fleet that is simulated: what affinity, queue limits and scaling rules do to TTFT and cost.

    python benchmarks/fleet.py [--workers 2] [--small] [--json]

One to 500 replicas of a recipe on GPUs, with the times that `pipeline plan` computes for its engine, under traffic like
that which others published, for minutes or for a day, with bursts and with nodes that are lost. The model is in
`benchmarks/simulation/`, what it means in docs/explanation/fleet.md. First it is held against the formula of a queue,
against throughput that was published, and against the `cpu` engine as it was measured here (`benchmarks/results.json`).

All is drawn from one seed: two runs print the same. Exit code 1 says that the queue's formula lies outside the
interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import HERE, markdown
from benchmarks.simulation.checks import (
    against_cpu,
    against_erlang_c,
    against_published,
    against_replicas,
    errors,
)
from benchmarks.simulation.experiments import (
    CHOSEN,
    HASTY,
    LATE,
    POLICY,
    RECIPE,
    SECTIONS,
    SMALL,
    Sizes,
    start_s,
)
from benchmarks.simulation.scenarios import full_rate, run_all, service_of
from benchmarks.simulation.traffic import PEOPLE, PROGRAMS
from pipeline.client.spreading import LOAD_BOUND


def checks(small: bool) -> dict[str, Any]:
    """Hold the simulation against what is known."""
    published = [] if small else list(against_published("llama-3.3-70b", "h100-sxm-80g"))
    kept = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    cpu = kept["cpu_engine"]["result"]["rows"]
    return {
        "queue": against_erlang_c(requests=2_000 if small else 20_000),
        "published": errors(published),
        "cpu": against_cpu(cpu),
        "replicas": list(against_replicas(kept["replicas"]["result"]["rows"], cpu))
        if "replicas" in kept
        else [],
    }


def run(small: bool, workers: int) -> dict[str, Any]:
    """Run everything.

    Args:
        small: As small as it can be.
        workers: Processes.
    """
    sizes = SMALL if small else Sizes()
    rows = {name: make(sizes) for name, make in SECTIONS.items()}
    began = time.monotonic()
    found = iter(run_all([row.scenario for made in rows.values() for row in made], workers))
    sections = {name: [row.labels | next(found) for row in made] for name, made in rows.items()}
    service = service_of(RECIPE)
    asked = sum(row["asked"] for made in sections.values() for row in made)
    print(f"{asked:,} requests in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    result = {
        "replica": {
            "recipe": RECIPE,
            "gpus": service.gpus,
            "slots": service.slots,
            "kv_tokens": service.blocks * service.block_tokens,
            "ttft_s": service.ttft_s,
            "full_rate": {kind.name: round(full_rate(service, kind), 4) for kind in (PEOPLE, PROGRAMS)},
            "start_s": round(start_s(RECIPE), 1),
        },
        "traffic": {
            kind.name: {"prompt": kind.mean_prompt, "reusable": kind.reusable} for kind in (PEOPLE, PROGRAMS)
        },
        "checks": checks(small),
        "sections": sections,
    }
    # JSON has neither infinity nor what is not a number.
    return json.loads(json.dumps(result), parse_constant=lambda _: None)  # type: ignore[no-any-return]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _percent(share: float | None, digits: int = 0) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def _affinity_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("recipe, traffic, replicas", "way", "TTFT p50", "p99", "prompt tokens reused", "within the SLO")
    lines = [
        (
            f"{row['recipe']}, {row['traffic']}, {row['replicas']}{', KV cache x 8' if row['pages'] > 1 else ''}",
            "" if row["replicas"] == 1 else row["way"], _ms(row["ttft_p50_s"]), _ms(row["ttft_p99_s"]),
            _percent(row["reused"]), _percent(row["in_time"], 1),
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def _bounds_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("load, c", "TTFT p50", "p99", "prompt tokens reused")
    lines = [
        (
            f"{row['load']:g}, {'only the slots' if row['c'] is None else format(row['c'], 'g')}",
            _ms(row["ttft_p50_s"]), _ms(row["ttft_p99_s"]), _percent(row["reused"], 1),
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def _queues_table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "requests that may wait, of the slots",
        "refused",
        "TTFT p50",
        "p99 of the others",
        "within the SLO, of all",
    )
    lines = [
        (
            "no limit" if row["limit"] is None else f"{row['limit']:g}",
            _percent(row["refused"] / max(1, row["asked"]), 1),
            _ms(row["ttft_p50_s"]), _ms(row["ttft_p99_s"]), _percent(row["in_time"], 1),
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def _day_table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "rule",
        "GPU hours",
        "beside none",
        "TTFT p99",
        "within the SLO",
        "refused",
        "replicas",
        "changes",
        "turns",
    )
    fixed = rows[0]["gpu_hours"]
    lines = [
        (
            row["rule"], f"{row['gpu_hours']:,.0f}", _percent(row["gpu_hours"] / fixed), _ms(row["ttft_p99_s"]),
            _percent(row["in_time"], 2), _percent(row["refused"] / row["asked"], 2),
            f"{row['fewest_replicas']} to {row['most_replicas']}", row["added"] + row["removed"], row["turns"],
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def _losses_table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "replicas needed and spare, toleration", "broken", "asked again", "refused", "TTFT p99",
        "within the SLO, of all",
    )  # fmt: skip
    lines = [
        (
            f"{row['replicas']} + {row['spare']}, {row['toleration_s']:g} s", row["broken"], row["asked_again"],
            row["refused"], _ms(row["ttft_p99_s"]), _percent(row["in_time"], 1),
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def _starts_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("start, spare replicas", "refused", "TTFT p99", "within the SLO, of all", "most replicas")
    lines = [
        (
            f"{row['start_s']:g} s, {row['spare']}", _percent(row["refused"] / max(1, row["asked"]), 1),
            _ms(row["ttft_p99_s"]), _percent(row["in_time"], 1), row["most_replicas"],
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def _checks_table(found: dict[str, Any]) -> str:
    queue, cpu, lines = found["queue"], found["cpu"], []
    lines.append(
        (
            f"mean wait of M/M/{queue['servers']} at {_percent(queue['load'])} (Erlang C)",
            f"{queue['expected_s']:.4f} s",
            f"{queue['simulated_s']:.4f} s, 95 % interval ± {queue['half_interval_s']:.4f} s",
        )
    )  # fmt: skip
    published = found["published"]
    # Runs that are kept from before have figures that constants were fitted to, and others, apart.
    parts = [published] if "count" in published else [part["simulated"] for part in published.values()]
    lines += [
        (
            f"{part['count']} published throughputs, Llama 3.3 70B on H100",
            "the measurements",
            f"median error {_percent(part['median'], 1)}, worst {_percent(part['worst'])}",
        )
        for part in parts
        if part["count"]
    ]
    lines.append(
        (
            f"`cpu` engine, {cpu['streams']} streams (from 1 and 16)", f"measured: {cpu['measured']:,.0f} tokens/s",
            f"{cpu['simulated']:,.0f} tokens/s ({cpu['simulated'] / cpu['measured'] - 1:+.1%})",
        )
    )  # fmt: skip
    lines += [
        (
            f"KV reuse, {row['servers']} servers of `tiny-cpu`, {row['way']}",
            f"measured: {row['measured']:.1%}",
            f"{row['simulated']:.1%}",
        )
        for row in found["replicas"]
    ]
    return markdown(("check", "expected", "simulated"), lines)


def _recommended_table() -> str:
    lines = [
        ("scale on requests that run and wait, of a replica's slots", f"{POLICY.requests:g}"),
        ("replicas on top", POLICY.spare),
        ("... or on p95 of the wait for a slot, of the target of TTFT", f"{POLICY.queue_time:g}"),
        ("... or on KV use", f"{POLICY.kv_cache:g}"),
        ("stabilization window, up and down", f"{POLICY.up_window_s} s and {POLICY.down_window_s} s"),
        ("added at most in a minute", f"{POLICY.up_percent} %, or {POLICY.up_pods}"),
        ("removed at most in a minute", f"{POLICY.down_percent} %, or {POLICY.down_pods}"),
        ("requests that may wait, of the slots", f"{POLICY.max_waiting:g}"),
        ("toleration of a node that is gone", f"{POLICY.lost_node_s} s"),
        ("affinity bound c", f"{LOAD_BOUND:g}"),
    ]
    return markdown(("setting", "value"), lines)


def tables(result: Any) -> dict[str, Callable[[], str]]:
    """Name -> what makes a table of the JSON."""
    sections = result["sections"]
    return {
        "checks": lambda: _checks_table(result["checks"]),
        "affinity": lambda: _affinity_table(sections["affinity"]),
        "bounds": lambda: _bounds_table(sections["bounds"]),
        "queues": lambda: _queues_table(sections["queues"]),
        "day": lambda: _day_table(sections["day"]),
        "losses": lambda: _losses_table(sections["losses"]),
        "starts": lambda: _starts_table(sections["starts"]),
        "recommended": _recommended_table,
    }


def table(result: Any, part: str = "checks") -> str:
    """One table, as the pages show it.

    Args:
        result: The JSON.
        part: Which one; the page of measurements has what is compared with measurements.
    """
    return tables(result)[part]()


def day_chart(result: Any) -> str:
    """The day as an `<svg>` element: load, replicas and p99 of TTFT under three rules; empty without matplotlib.

    Args:
        result: The JSON.
    """
    from pipeline.charts import has_matplotlib, inline_svg, svg_text

    if not has_matplotlib():
        return ""
    colors = {LATE: "#e8603c", HASTY: "#8d7ae6", CHOSEN: "#3b8ee0"}
    rows = {row["rule"]: row.get("timeline") for row in result["sections"]["day"]}

    def draw() -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6.5), layout="constrained")
        load, replicas, first = figure.subplots(3, 1, sharex=True)
        for name, color in colors.items():
            line = rows[name]
            replicas.plot(line["hours"], line["replicas"], color=color, linewidth=1.4, label=name)
            late = [math.nan if value is None else 1e3 * value for value in line["ttft_p99_s"]]
            first.plot(line["hours"], late, color=color, linewidth=1.2)
        line = rows[CHOSEN]
        load.fill_between(line["hours"], line["requests_per_s"], color="#6b7785", alpha=0.5, linewidth=0)
        first.axhline(1e3 * result["replica"]["ttft_s"], color="#6b7785", linestyle="--", linewidth=1)
        load.set_ylabel("requests/s")
        replicas.set_ylabel("replicas")
        first.set_ylabel("TTFT p99, ms")
        first.set_yscale("log")
        first.set_xlabel("hour of the day")
        replicas.legend(frameon=False, fontsize="small")
        for axes in (load, replicas, first):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        return figure

    alt = "A day: requests a second, replicas, and p99 of TTFT in steps of ten minutes, under three rules of scaling"
    text = svg_text(inline_svg(draw, "fleet-day", alt))
    # One line: what follows an empty line would not be HTML any more to Markdown.
    return " ".join(text.split())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--small", action="store_true", help="as little as shows that it works")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    result = run(arguments.small, arguments.workers)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n\n".join(f"{name}\n\n{make()}" for name, make in tables(result).items()))
    queue = result["checks"]["queue"]
    return int(
        not arguments.small and abs(queue["simulated_s"] - queue["expected_s"]) > queue["half_interval_s"]
    )


if __name__ == "__main__":
    sys.exit(main())
