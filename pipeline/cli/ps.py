"""`pipeline ps`: what is served on this machine, and how it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import json_option, store_option
from pipeline.cli.output import note, print_columns, print_cut, print_json

if TYPE_CHECKING:
    from pipeline.serving.status import DeploymentStatus


@click.command(name="ps")
@store_option
@json_option
def command(store: Path | None, as_json: bool) -> None:
    """List the deployments that `pipeline serve` runs on this machine: state, requests, KV cache, ports.

    A deployment whose supervisor was killed is `lost`, and shown once, or for as long as processes of it run. What gave
    up stays, with the reason, until it is served again or `pipeline stop` removes it.

    \b
    pipeline ps
    pipeline ps --json
    """
    from pipeline.serving.status import forget, list_deployments
    from pipeline.store import Store

    shelf = Store.at(store)
    found = list_deployments(shelf.running)
    if as_json:
        print_json([one.as_json() for one in found])
    elif not found:
        note(f"nothing is served from the store {shelf.root}")
    else:
        header = ("NAME", "STATE", "UP", "RESTARTS", "REQUESTS", "KV", "PACKAGE", "MODEL", "ADDRESSES")
        print_columns([header, *map(_row, found)])
        for one in found:
            if one.reason:
                print_cut(f"{one.name}: {one.reason}")
    for one in found:
        if one.state == "lost" and not one.pids:
            forget(shelf.running, one)


def _row(one: DeploymentStatus) -> tuple[str, ...]:
    figures, record = one.figures, one.record
    deployment = one.deployment
    busy = f"{figures.running} running" if figures.running is not None else "-"
    total = "" if figures.requests is None else f", {figures.requests} in all"
    return (
        one.name,
        one.state,
        "-" if one.uptime_s is None else duration(one.uptime_s),
        ", ".join(f"{kind} {count}" for kind, count in record.restarts.items() if count) or "0",
        busy + total,
        "-" if figures.kv_used is None else f"{figures.kv_used:.0%}",
        "-" if deployment is None else deployment.digest[:12],
        "-" if deployment is None else f"{deployment.entry_model} ({deployment.runtime})",
        "-" if not one.alive else _addresses(one),
    )


def _addresses(one: DeploymentStatus) -> str:
    record = one.record
    http = f", HTTP {_bare(record.http_url)}" if record.http_url else ""
    triton = f"gRPC {record.grpc_url}{http}, metrics {_bare(record.metrics_url)}"
    return f"{record.gateway_url}/v1, {triton}" if record.gateway_url else triton


def _bare(url: str) -> str:
    return url.removeprefix("http://").partition("/")[0]


def duration(seconds: float) -> str:
    """Write a time in its two largest units.

    >>> duration(59), duration(3725), duration(200000)
    ('59s', '1h 2m', '2d 7h')
    """
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(int(seconds), size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
