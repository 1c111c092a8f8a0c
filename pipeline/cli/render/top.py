"""The table of `pipeline top`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipeline.cli.ps import duration
from pipeline.printable import printable
from pipeline.serving.status import DeploymentStatus
from pipeline.store import human_bytes

_COLORS = {"ready": "green", "failed": "red", "unready": "red", "failing": "red", "lost": "red"}
_LEFT = ("deployment", "state")
_COLUMNS = (
    *_LEFT, "up", "run/wait/stall", "tok/s", "TTFT p50/p95", "ITL p50/p95", "KV", "hits", "requests", "restarts",
    "memory",
)  # fmt: skip


def top_table(deployments: Sequence[DeploymentStatus], hint: str = "") -> Group:
    """Make the table; latencies in milliseconds.

    Args:
        deployments: one row each; below are the reasons why some are not ready.
        hint: written below.
    """
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for one in deployments:
        figures = one.figures
        table.add_row(
            one.name,
            f"[{_COLORS.get(one.state, 'yellow')}]{one.state}[/]",
            "-" if one.uptime_s is None else duration(one.uptime_s),
            "/".join(map(_number, (figures.running, figures.waiting, figures.stalled))),
            _number(figures.tokens_per_s),
            "/".join(map(_ms, (figures.ttft_p50_ms, figures.ttft_p95_ms))),
            "/".join(map(_ms, (figures.itl_p50_ms, figures.itl_p95_ms))),
            _share(figures.kv_used),
            _share(figures.cache_hits),
            _number(figures.requests),
            str(sum(one.record.restarts.values())),
            "-" if one.memory_bytes is None else human_bytes(one.memory_bytes),
        )
    reasons = [f"{one.name}: {one.reason}" for one in deployments if one.reason]
    lines = [Text(printable(line, lines=False)) for line in reasons]
    return Group(table, *lines, *([Text(hint, "dim")] if hint else []))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
