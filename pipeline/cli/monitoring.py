"""`pipeline monitoring`: files with which Prometheus and Grafana watch a deployment."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import click

from pipeline.cli.options import Verb, complete_deployment, open_store, set_option
from pipeline.cli.output import note

_GATEWAY = "127.0.0.1:8080"


def _address(text: str, option: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise click.BadParameter(f"{text}: is not HOST:PORT", param_hint=option)
    return text


def _gateways(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(_address(text, "--gateway") for text in texts)


def _tritons(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    servers = []
    for text in texts:
        name, mark, address = text.partition("=")
        if not mark or not name:
            raise click.BadParameter(f"{text}: is not NAME=HOST:PORT", param_hint="--triton")
        servers.append((name, _address(address, "--triton")))
    return tuple(servers)


@click.command(name="monitoring", cls=Verb)
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE…", shell_complete=complete_deployment)
@set_option
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Where the files go; those of an earlier call are replaced.",
)
@click.option(
    "--gateway",
    "gateways",
    multiple=True,
    metavar="HOST:PORT",
    callback=_gateways,
    help=f"Gateway in front of the recipes; by default that of the running deployment, or {_GATEWAY}. May be repeated.",
)
@click.option(
    "--triton",
    "tritons",
    multiple=True,
    metavar="NAME=HOST:PORT",
    callback=_tritons,
    help="Metrics of a Triton server that runs the recipe NAME; by default a file in the store that names those of the "
    "deployment here, also after rollouts. May be repeated.",
)
@click.option(
    "--speedup",
    type=click.FloatRange(min=1),
    default=1.0,
    show_default=True,
    metavar="N",
    help="Divide all windows, waits and intervals by N, to rehearse alerts. Not for production.",
)
def command(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    output: Path,
    gateways: tuple[str, ...],
    tritons: tuple[tuple[str, str], ...],
    speedup: float,
) -> None:
    """Write Prometheus rules and a Grafana dashboard, with the targets of each RECIPE's SLO.

    RECIPE may also be the name of a running deployment.

    \b
    pipeline monitoring tiny-cpu --output monitoring/
    promtool test rules monitoring/alerts_test.yaml
    prometheus --config.file monitoring/prometheus.yml

    FOLDER gets alerts.yaml (recording rules and alerts), alerts_test.yaml (their unit tests), prometheus.yml (what is
    scraped) and dashboard.json (Grafana: Dashboards, New, Import). Alerts on latencies need slo.ttft_p95_ms and
    slo.itl_p95_ms; --set slo.ttft_p95_ms=500 gives one for this call. They link to deploy.runbook_url.
    """
    from pipeline.deploy.alerts import TimeScale
    from pipeline.deploy.monitoring import WatchedDeployment, monitoring_files
    from pipeline.errors import UserError
    from pipeline.serving.deployments import find_deployment
    from pipeline.triton.running import metrics_targets

    opened = open_store()
    deployments = [find_deployment(name, overrides, opened) for name in recipes]
    known = [deployment.recipe.name for deployment in deployments]
    faults = [f"{name}: is named twice" for name in sorted({name for name in known if known.count(name) > 1})]
    faults += [
        f"--triton {name}=…: is none of the recipes ({', '.join(known)})"
        for name, _ in tritons
        if name not in known
    ]
    if faults:
        raise UserError("\n".join(faults))
    watched = []
    for recipe, running in ((deployment.recipe, deployment.server) for deployment in deployments):
        gateway = "" if running is None else urlsplit(running.gateway_url).netloc
        targets = tuple(address for name, address in tritons if name == recipe.name) or metrics_targets(
            opened.running.absolute(), recipe.name
        )
        watched.append(WatchedDeployment(recipe, gateways or (gateway or _GATEWAY,), targets))
        tritons_here = f"as {targets} says" if isinstance(targets, Path) else ", ".join(targets)
        note(f"{recipe.name}: gateway {', '.join(watched[-1].gateways)}; Triton {tritons_here}")
        lacking = [key for key in ("ttft_p95_ms", "itl_p95_ms") if getattr(recipe.slo, key) is None]
        if lacking:
            note(
                f"{recipe.name}: has no {' and no '.join(f'slo.{key}' for key in lacking)}: no alerts on targets"
            )
    files = monitoring_files(watched, TimeScale(speedup))
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (output / name).write_text(text, encoding="utf-8")
        click.echo(output / name)
