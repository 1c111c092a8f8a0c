"""The table of `pipeline top`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from pipeline.serving.live import LiveDeployment
from pipeline.store import human_bytes

_COLORS = {"ready": "green", "failed": "red", "unready": "red", "gone": "red"}
_COLUMNS = (
    "deployment", "state", "up", "running", "waiting", "stalled", "tok/s", "TTFT p50", "p95", "ITL p50", "p95", "KV",
    "cache hits", "requests", "restarts", "memory",
)  # fmt: skip


def top_table(deployments: Sequence[LiveDeployment], hint: str = "") -> Table:
    """Make the table; latencies in milliseconds.

    Args:
        deployments: one row each, with the reason below where it is not ready.
        hint: written below.
    """
    table = Table(box=SIMPLE, pad_edge=False, caption=hint, caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right", no_wrap=True)
    for one in deployments:
        figures = one.figures
        color = _COLORS.get(one.state, "yellow")
        table.add_row(
            one.name,
            f"[{color}]{one.state}[/]",
            _duration(one.up_s),
            *map(_number, (figures.running, figures.waiting, figures.stalled, figures.tokens_per_s)),
            *map(_ms, (figures.ttft_p50_ms, figures.ttft_p95_ms, figures.itl_p50_ms, figures.itl_p95_ms)),
            *map(_share, (figures.kv_used, figures.cache_hits)),
            _number(figures.requests),
            str(sum(one.restarts.values())),
            "-" if one.memory_bytes is None else human_bytes(one.memory_bytes),
        )
        if one.reason:
            table.add_row(f"  {one.reason}")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
