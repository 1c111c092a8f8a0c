"""`pipeline gateway`: an OpenAI-compatible server in front of running deployments."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from pipeline.cli.options import store_option


@click.command(name="gateway")
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE…")
@store_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=8080, show_default=True, help="Where to listen.")
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="NAME=HOST:PORT",
    help="Triton's gRPC of a recipe that this machine does not serve itself.",
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
def command(
    recipes: tuple[str, ...],
    store: Path | None,
    host: str,
    port: int,
    endpoints: tuple[str, ...],
    keys: Path | None,
    max_waiting: int,
    drain_s: int,
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
    from pipeline.errors import UserError
    from pipeline.gateway.app import Gateway
    from pipeline.gateway.server import GatewayServer
    from pipeline.gateway.setup import served
    from pipeline.gateway.tenants import Tenants
    from pipeline.planning.preflight import ALLOWABLE
    from pipeline.progress import Silent
    from pipeline.recipe import load_recipe
    from pipeline.stages import Builder, prepare
    from pipeline.store import Store
    from pipeline.triton.running import RunningServer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    shelf, elsewhere = Store.at(store), dict(_endpoint(text) for text in endpoints)
    models = {}
    for name in recipes:
        recipe = load_recipe(name, ())
        if recipe.name in elsewhere:
            prepared = prepare(
                recipe, shelf, offline=True, allowed=ALLOWABLE
            )  # it was judged when it was built
            package = Builder(prepared.plan, shelf, prepared.work(Silent(), shelf), Silent()).finished().path
            url = elsewhere[recipe.name]
        else:
            running = RunningServer.find(shelf.running, recipe.name)
            if running is None:
                raise UserError(
                    f"{recipe.name} is not served here: pipeline serve {name}, or --endpoint {recipe.name}=…"
                )
            package, url = running.deployment.parent, running.grpc_url
        models[recipe.name] = served(recipe, package, url, shelf.caches, max_waiting=max_waiting)
    gateway = Gateway(models, Tenants.load(keys) if keys else Tenants())
    click.echo(
        f"gateway for {', '.join(models)}: http://{host}:{port}/v1   page: http://{host}:{port}/   stop: Ctrl-C"
    )
    GatewayServer(gateway, host, port, drain_s=drain_s).run()


def _endpoint(text: str) -> tuple[str, str]:
    name, mark, url = text.partition("=")
    if not mark or ":" not in url:
        raise click.BadParameter(f"{text}: is not NAME=HOST:PORT", param_hint="--endpoint")
    return name, url
