"""The table of `pipeline top`; several below each other where the terminal is too narrow for one."""

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
# On both sides of a cell.
_PADDING = 1
_COLUMNS = (
    *_LEFT, "up", "run/wait/stall", "tok/s", "TTFT p50/p95", "ITL p50/p95", "KV", "hits", "requests", "restarts",
    "memory",
)  # fmt: skip


def top_table(deployments: Sequence[DeploymentStatus], width: int, hint: str = "") -> Group:
    """Make the table; latencies in milliseconds.

    Below are the reasons why some deployments are not ready.

    Args:
        width: Columns of the terminal. Columns that do not fit go into a further table, each with the names in front.
        hint: Line below.
    """
    rows = [_cells(deployment) for deployment in deployments]
    tables = [_table(chosen, deployments, rows) for chosen in _split(rows, width)]
    reasons = [f"{deployment.name}: {deployment.reason}" for deployment in deployments if deployment.reason]
    lines = [Text(printable(line, lines=False)) for line in reasons]
    return Group(*tables, *lines, *([Text(hint, "dim")] if hint else []))


def _cells(deployment: DeploymentStatus) -> tuple[str, ...]:
    figures = deployment.figures
    return (
        deployment.name,
        deployment.state,
        "-" if deployment.uptime_s is None else duration(deployment.uptime_s),
        "/".join(map(_number, (figures.running, figures.waiting, figures.stalled))),
        _number(figures.tokens_per_s),
        "/".join(map(_ms, (figures.ttft_p50_ms, figures.ttft_p95_ms))),
        "/".join(map(_ms, (figures.itl_p50_ms, figures.itl_p95_ms))),
        _share(figures.kv_used),
        _share(figures.cache_hits),
        _number(figures.requests),
        str(sum(deployment.record.restarts.values())),
        "-" if deployment.memory_bytes is None else human_bytes(deployment.memory_bytes),
    )


def _split(rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return the columns of each table, by their numbers; the name is in front of each."""
    # With the line between two columns, and the one at the left edge.
    widths = [max(map(len, column)) + 2 * _PADDING + 1 for column in zip(_COLUMNS, *rows, strict=True)]
    tables = [[0]]
    for number in range(1, len(_COLUMNS)):
        if len(tables[-1]) > 1 and 1 + sum(widths[column] for column in (*tables[-1], number)) > width:
            tables.append([0])
        tables[-1].append(number)
    return tables


def _table(
    chosen: Sequence[int], deployments: Sequence[DeploymentStatus], rows: Sequence[Sequence[str]]
) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, _PADDING))
    for number in chosen:
        column = _COLUMNS[number]
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for deployment, row in zip(deployments, rows, strict=True):
        color = {"state": _COLORS.get(deployment.state, "yellow")}
        table.add_row(*(Text(row[number], color.get(_COLUMNS[number], "")) for number in chosen))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
