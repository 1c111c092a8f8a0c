"""`pipeline gateway`: an OpenAI-compatible server in front of running deployments."""

from __future__ import annotations

import json
import os
from functools import partial

import click

from pipeline.cli.options import Verb, complete_deployment, set_option, store_root
from pipeline.cli.settings_options import options_of
from pipeline.gateway.settings import GatewaySettings, GatewayStart, ListenSettings, ModelSources

# gRPC reads these when it is imported, hence not before here.
# It writes of lost connections to standard error by itself.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its event engine hands each message from thread to thread, which takes processor time where tokens come one by one.
# Without it, the thread that waits for messages reads them, too (grpcio 1.85; an unknown name is ignored).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")


@click.command(name="gateway", cls=Verb)
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_deployment)
@set_option
@options_of(ModelSources, "sources")
@options_of(ListenSettings, "listening")
@click.option("--child", "--worker", "message", type=int, hidden=True)
@click.option("--dry-run", is_flag=True, help="Print what would be served, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
def command(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    sources: ModelSources,
    listening: ListenSettings,
    message: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve OpenAI's HTTP API (/v1/chat/completions and so on) for the models of RECIPEs, which `pipeline serve` runs.

    `pipeline serve` starts a gateway itself; this command runs one separately, on another machine or in front of
    several servers.

    \b
    pipeline serve tiny-cpu --no-gateway
    pipeline gateway tiny-cpu
    pipeline gateway --package /deployment --endpoint triton:8001
    curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "tiny-cpu", "messages": [{"role": "user", "content": "Hi"}]}'

    Limits, timeouts and logs are set in the recipe's section `gateway`; recipes that are served together need the same.

    A page to chat with is at /, metrics are at /metrics. A file of keys looks like this:

    \b
    tenants:
      shop: {keys: [sk-shop-…], limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 16}}

    Each choice counts as a request: two prompts with n=3 are six. Refused requests count, too. Tenants that wait
    for the same model take turns.
    """
    from pipeline.dropping_output import drop_unwritable_output
    from pipeline.machine.processes import die_with_parent
    from pipeline.store import Store

    start = GatewayStart(
        recipes=recipes, overrides=overrides, store=store_root(), sources=sources,
        settings=GatewaySettings(**listening.model_dump(exclude_unset=True)), undecided=True,
    )  # fmt: skip
    if message is not None:
        start = GatewayStart.from_descriptor(message)
    if start.parent is not None and not die_with_parent(start.parent):
        return
    if not dry_run:
        drop_unwritable_output()
    if not start.recipes and start.sources.package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    from pipeline.frontend.serve import known_recipes, require_packages

    artifacts = Store.at(start.store)
    known = known_recipes(start, artifacts)
    settings = GatewaySettings.of(start.settings, known) if start.undecided else start.settings
    require_packages(known, artifacts, settings)
    from pipeline.frontend.process import describe_models, serve_gateway

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    if not dry_run:
        serve_gateway(start, click.echo, partial(click.echo, err=True))
        return
    models = describe_models(start)
    if as_json:
        click.echo(json.dumps({"models": models}, indent=2))
    else:
        click.echo("\n".join(f"{name}: {value}" for model in models for name, value in model.items()))
