"""`pipeline ps`: the deployments of this machine and their states."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, json_option, open_store
from pipeline.cli.output import aligned, note, print_cut, print_json, short_path
from pipeline.printable import printable

if TYPE_CHECKING:
    from pipeline.serving.status import DeploymentStatus
    from pipeline.store import Store

_HEADER = ("NAME", "STATE", "UP", "RESTARTS", "REQUESTS", "KV")


@click.command(name="ps", cls=Verb)
@json_option
def command(as_json: bool) -> None:
    """List the deployments that `pipeline serve` runs on this machine: state, requests, KV cache, addresses.

    A deployment whose supervisor was killed is listed as `lost` once, or for as long as any of its processes run. One
    that failed stays in the list, with the reason, until it is served again or `pipeline stop` removes it.

    \b
    pipeline ps
    pipeline ps --json
    """
    from pipeline.serving.status import forget, list_deployments

    opened = open_store()
    deployments = list_deployments(opened.running)
    if as_json:
        print_json([status.as_json() for status in deployments])
    elif not deployments:
        note(f"nothing is served from the store {opened.root}")
    else:
        header, *rows = aligned([_HEADER, *map(_row, deployments)])
        print_cut(header)
        for row, status in zip(rows, deployments, strict=True):
            print_cut(row)
            for title, text in _details(status, opened):
                # Whole, so that it can be copied.
                click.echo(f"  {title:<8} {printable(text, lines=False)}")
    for status in deployments:
        if status.state == "lost" and not status.pids:
            forget(opened.running, status)


def _row(deployment: DeploymentStatus) -> tuple[str, ...]:
    figures, record = deployment.figures, deployment.record
    busy = f"{figures.running} running" if figures.running is not None else "-"
    total = "" if figures.requests is None else f", {figures.requests} in all"
    return (
        deployment.name,
        deployment.state,
        "-" if deployment.uptime_s is None else duration(deployment.uptime_s),
        ", ".join(f"{kind} {count}" for kind, count in record.restarts.items() if count) or "0",
        busy + total,
        "-" if figures.kv_used is None else f"{figures.kv_used:.0%}",
    )


def _details(deployment: DeploymentStatus, store: Store) -> Iterator[tuple[str, str]]:
    """Yield title and text of each line below a deployment's row."""
    record = deployment.record
    if deployment.reason:
        yield "reason", deployment.reason
    package = record.deployment.parent
    deployed = deployment.deployment
    model = "" if deployed is None else f", model {deployed.entry_model} ({deployed.runtime})"
    # In the store by the name that `pipeline store ls` prints.
    yield "package", (package.name if package.parent == store.artifacts else short_path(package)) + model
    if record.recipe:
        sets = (part for override in record.overrides for part in ("--set", override))
        yield "recipe", shlex.join((record.recipe[0], *sets))
    if deployment.alive:
        if record.gateway_url:
            yield "OpenAI", f"{record.gateway_url}/v1"
        http = f", HTTP {_bare(record.http_url)}" if record.http_url else ""
        yield "Triton", f"gRPC {record.grpc_url}{http}, metrics {_bare(record.metrics_url)}"


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
