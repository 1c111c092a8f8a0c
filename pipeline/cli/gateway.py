"""`pipeline gateway`: an OpenAI-compatible server in front of running deployments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from pipeline.cli.options import set_option, store_option

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@click.command(name="gateway")
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE…")
@set_option
@store_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=8080, show_default=True, help="Where to listen; 0 takes a free one.")
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="NAME=HOST:PORT",
    help="Triton's gRPC of a recipe that this machine does not serve itself. Repeat it for several servers.",
)
@click.option(
    "--keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Tenants with their API keys and limits (YAML); without it everybody may ask.",
)
@click.option(
    "--max-waiting",
    default=256,
    show_default=True,
    help="Requests of a model that wait; more are answered by 429.",
)
@click.option("--drain-s", default=30, show_default=True, help="How long requests may take after a stop.")
@click.option(
    "--traces",
    metavar="URL",
    help="OTLP receiver for spans, such as http://localhost:4318; by default $OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of the line that each request leaves on standard error.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be served; serve nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
def command(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    host: str,
    port: int,
    endpoints: tuple[str, ...],
    keys: Path | None,
    max_waiting: int,
    drain_s: int,
    traces: str | None,
    log_format: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve the models of RECIPEs, which `pipeline serve` runs, as OpenAI does: /v1/chat/completions and so on.

    \b
    pipeline serve tiny-cpu
    pipeline gateway tiny-cpu
    curl localhost:8080/v1/chat/completions -d '{"model": "tiny-cpu", "messages": [{"role": "user", "content": "Hi"}]}'

    A page to chat is at /, figures are at /metrics. A file of keys looks like this:

    \b
    tenants:
      shop: {keys: [sk-shop-…], limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 16}}
    """
    from pipeline.gateway.caching import needs_of_cache
    from pipeline.gateway.traces import ENDPOINTS
    from pipeline.machine.packages import Need, require
    from pipeline.recipe import load_recipe
    from pipeline.store import Store

    shelf = Store.at(store)
    needs = [Need("gateway", "the gateway")]
    needs += [Need("traces", "traces")] if traces or any(map(os.environ.get, ENDPOINTS)) else []
    needs += [need for name in recipes for need in needs_of_cache(load_recipe(name, overrides), shelf)]
    require("the gateway", needs)
    from pipeline.gateway.app import Gateway
    from pipeline.gateway.locating import locate
    from pipeline.gateway.server import GatewayServer
    from pipeline.gateway.setup import served
    from pipeline.gateway.tenants import Tenants
    from pipeline.gateway.traces import spans
    from pipeline.gateway.track import log_to_stderr

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    elsewhere: dict[str, list[str]] = {}
    for name, url in map(_endpoint, endpoints):
        elsewhere.setdefault(name, []).append(url)
    located = locate(recipes, overrides, shelf, elsewhere)
    tenants = Tenants.load(keys) if keys else Tenants()
    if dry_run:
        described = [one.describe() for one in located]
        lines = [f"{name}: {value}" for one in described for name, value in one.items()]
        click.echo(json.dumps({"models": described}, indent=2) if as_json else "\n".join(lines))
        return
    log_to_stderr(as_json=log_format == "json")
    models = {
        one.recipe.name: served(one.recipe, one.package, one.urls, shelf, max_waiting=max_waiting)
        for one in located
    }
    gateway = Gateway(models, tenants, spans=spans(traces), log_as_json=log_format == "json")
    server = GatewayServer(gateway, host, port, drain_s=drain_s)
    server.on_start = lambda: click.echo(
        f"gateway for {', '.join(models)}: {server.url}/v1   page: {server.url}/   stop: Ctrl-C"
    )
    server.run()


def _endpoint(text: str) -> tuple[str, str]:
    name, mark, url = text.partition("=")
    if not mark or ":" not in url:
        raise click.BadParameter(f"{text}: is not NAME=HOST:PORT", param_hint="--endpoint")
    return name, url
