"""`pipeline gateway`: an OpenAI-compatible server in front of running deployments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.gateway_options import StartsGateway, gateway_options, given_words, read_endpoints
from pipeline.cli.options import complete_deployment, set_option, store_option

if TYPE_CHECKING:
    from socket import socket

    from pipeline.cache.redis import RedisAddress
    from pipeline.client.spreading import Spread
    from pipeline.gateway.metric_names import MetricNames
    from pipeline.gateway.prompt_log import PromptLog
    from pipeline.gateway.tenants import Tenants
    from pipeline.gateway.workers.worker import GatewayWorker, WorkerPlace
    from pipeline.recipe import Recipe
    from pipeline.store import Store

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@click.command(name="gateway", cls=StartsGateway)
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_deployment)
@set_option
@store_option
@click.option(
    "--package",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Serve the model of this package, with --endpoint; a RECIPE beside it gives settings, such as its cache.",
)
@gateway_options
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="[NAME=]HOST:PORT",
    callback=lambda _, __, given: read_endpoints(given),
    help="gRPC address of a Triton server elsewhere that runs a recipe, by its name unless there is one only. "
    "Repeat it for several servers; dns:NAME:PORT is every address that a DNS name has, asked again every few seconds.",
)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="S",
    help="Seconds to wait until `pipeline serve` runs the recipes. With --endpoint it starts at once; see /readyz.",
)
@click.option(
    "--spread",
    type=click.Choice(["affinity", "least-load", "random"]),
    default="affinity",
    show_default=True,
    help="Which of several servers gets a request. affinity: all turns of a conversation go to the same one, which has "
    "their KV cache, unless it has more than 1.25 times its share of the requests in flight. least-load: the one with "
    "the fewest requests in flight.",
)
@click.option("--listen-fd", "descriptors", multiple=True, type=int, hidden=True)
@click.option("--parent", type=int, hidden=True)
@click.option("--worker", "place_word", hidden=True)
@click.option("--dry-run", is_flag=True, help="Print what would be served, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
@click.pass_context
def command(
    context: click.Context,
    /,
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    package: Path | None,
    host: str,
    port: int,
    endpoints: tuple[tuple[str, str], ...],
    spread: Spread,
    wait_s: float,
    keys: Path | None,
    limits_redis: RedisAddress | None,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    max_waiting: int,
    max_wait_s: float,
    idle_timeout_s: float,
    workers: int,
    max_connections: int,
    drain_s: int,
    batch_folder: Path | None,
    batch_slots: int | None,
    max_file_mib: int,
    max_stored_mib: int,
    stored_responses: int,
    stored_responses_mib: int,
    stored_responses_s: float,
    traces: str | None,
    metric_names: tuple[MetricNames, ...],
    log_format: str,
    log_prompts: str,
    descriptors: tuple[int, ...],
    parent: int | None,
    place_word: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve the models of RECIPEs, which `pipeline serve` runs, by OpenAI's HTTP API: /v1/chat/completions and so on.

    `pipeline serve` starts one by itself; this is for one apart, on another machine or in front of several servers.

    \b
    pipeline serve tiny-cpu --no-gateway
    pipeline gateway tiny-cpu
    pipeline gateway --package /deployment --endpoint triton:8001
    curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "tiny-cpu", "messages": [{"role": "user", "content": "Hi"}]}'

    A page to chat is at /, figures are at /metrics. A file of keys looks like this:

    \b
    tenants:
      shop: {keys: [sk-shop-…], limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 16}}

    Each choice counts as a request: two prompts with n=3 are six. What is refused counts, too. Tenants that wait for
    the same model take turns.
    """
    from pipeline.dropping_output import drop_unwritable_output
    from pipeline.machine.processes import die_with_parent
    from pipeline.store import Store

    if parent is not None and not die_with_parent(parent):
        return
    if not dry_run:
        drop_unwritable_output()
    if not recipes and package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    artifacts = Store.at(store)
    known = _known_recipes(recipes, overrides, artifacts, wait_s=wait_s)
    require_packages(known, artifacts, traces, limits_redis)
    from pipeline.cli.discovery import load_served_model, locate_models, read_kv_cache_usage, record_followers
    from pipeline.errors import UserError
    from pipeline.gateway.access_log import log_to_stderr
    from pipeline.gateway.api.batches.storage import StorageLimits
    from pipeline.gateway.api.responses.stored import StoredResponseLimits
    from pipeline.gateway.app import Gateway
    from pipeline.gateway.connections import ConnectionLimits
    from pipeline.gateway.http_server import bound_sockets
    from pipeline.gateway.redis_limits import RedisBuckets
    from pipeline.gateway.served_model import WaitLimits
    from pipeline.gateway.server import GatewayServer
    from pipeline.gateway.state.opening import StateSettings, open_state
    from pipeline.gateway.tenants import Tenants
    from pipeline.gateway.traces import make_tracer
    from pipeline.gateway.web import AllowedHosts
    from pipeline.gateway.workers.worker import WorkerPlace
    from pipeline.private_files import owner_only

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    elsewhere: dict[str, list[str]] = {}
    for name, url in endpoints:
        elsewhere.setdefault(name, []).append(url)
    locate = partial(locate_models, recipes, overrides, artifacts, elsewhere, package=package)
    tenants = Tenants.load(keys) if keys else Tenants()
    if dry_run:
        described = [one.describe() for one in locate()]
        lines = [f"{name}: {value}" for one in described for name, value in one.items()]
        click.echo(json.dumps({"models": described}, indent=2) if as_json else "\n".join(lines))
        return
    log_to_stderr(as_json=log_format == "json")
    waits = WaitLimits(max_waiting, max_wait_s, idle_timeout_s or None, batch_slots)
    place = None if place_word is None else WorkerPlace.of_word(place_word)
    state = StateSettings(
        limits_redis,
        batch_folder,
        artifacts.root / "batches",
        StorageLimits(file_bytes=max_file_mib * 2**20, tenant_bytes=max_stored_mib * 2**20),
        StoredResponseLimits(stored_responses, stored_responses_mib * 2**20, stored_responses_s),
        # The parent removes the folder when all workers have ended.
        None if place is None else place.metrics / "responses.sqlite",
    )
    with owner_only(), _inherited(descriptors) if descriptors else bound_sockets(host, port) as sockets:
        located = locate(wait_s=wait_s)
        hosts = AllowedHosts(host, allowed_hosts)
        exposed = place is None and not hosts.loopback
        if exposed and (advice := _advice(allowed_hosts, keys=tenants.require_keys)):
            click.echo(advice, err=True)
        say_ready = partial(_say_ready, [one.recipe.name for one in located], host, sockets[0])
        if workers > 1 and place is None:
            _run_workers(context, sockets, tenants, say_ready)
            return
        worker = None if place is None else _become_worker(place, tenants)
        load = partial(load_served_model, store=artifacts, waits=waits, worker=worker, spread=spread)
        models = {one.recipe.name: load(one) for one in located}
        followers = record_followers(located, artifacts, waits=waits, worker=worker)
        try:
            batches, responses = open_state([one.recipe.cache for one in located], state)
        except ValueError as error:
            raise UserError(f"files, batches and stored responses: {error}") from error
        gateway = Gateway(
            models,
            tenants,
            hosts=hosts,
            origins=allowed_origins,
            tracer=make_tracer(traces),
            prompt_log=_prompt_log(log_prompts),
            metric_names=metric_names,
            followers=followers,
            stored_responses=responses,
            restarts=lambda: {follower.name: follower.restarts for follower in followers},
            kv_cache_usage=partial(read_kv_cache_usage, followers) if "vllm" in metric_names else dict,
            batches=batches,
            worker=worker,
            buckets=None if limits_redis is None else RedisBuckets(limits_redis),
        )
        limits = ConnectionLimits(connections=-(-max_connections // workers))
        server = GatewayServer(gateway, host, port, limits=limits, drain_s=drain_s)
        server.on_start = say_ready if worker is None else partial(worker.tell, "listens")
        server.run(sockets)


def _say_ready(names: Sequence[str], host: str, listening: socket) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    click.echo(f"gateway for {', '.join(names)}: {url}/v1   page: {url}/   stop: Ctrl-C")


def _become_worker(place: WorkerPlace, tenants: Tenants) -> GatewayWorker:
    """Share what the workers of a gateway share: limits and metrics from now on, the rest when the gateway starts."""
    from pipeline.gateway.metrics import share_metrics
    from pipeline.gateway.workers.shared_usage import SharedUsage
    from pipeline.gateway.workers.worker import GatewayWorker

    SharedUsage(place.usage, tenants, place.workers).share(place.number)
    share_metrics(place.metrics, place.number)
    return GatewayWorker(place)


def _run_workers(
    context: click.Context, sockets: Sequence[socket], tenants: Tenants, on_ready: Callable[[], None]
) -> None:
    """Serve by several processes of this command."""
    import tempfile

    from pipeline.gateway.redis_losses import RedisLosses
    from pipeline.gateway.workers.pool import WorkerPool

    values = context.params
    address = values["limits_redis"]
    words = given_words(context, without={"keys", "descriptors", "parent", "place_word"})
    for one in sockets:
        words += ["--listen-fd", str(one.fileno())]
    with tempfile.TemporaryFile() as keys:
        if values["keys"]:
            # A worker that is started again must know the same tenants.
            keys.write(values["keys"].read_bytes())
            keys.flush()
            words += ["--keys", f"/dev/fd/{keys.fileno()}"]

        def command(place: WorkerPlace) -> Sequence[str]:
            return (
                *(sys.executable, "-m", "pipeline.cli.main", "gateway"),
                *(*values["recipes"], *words),
                *("--parent", str(os.getpid()), "--worker", place.as_word()),
            )

        pool = WorkerPool(
            sockets,
            command,
            values["workers"],
            tenants=tenants,
            max_waiting=values["max_waiting"],
            batch_slots=values["batch_slots"],
            drain_s=values["drain_s"],
            on_ready=on_ready,
            inherit=(keys.fileno(),),
            losses=None if address is None else RedisLosses(address),
        )
        pool.run()


@contextmanager
def _inherited(descriptors: Sequence[int]) -> Iterator[list[socket]]:
    """The listening sockets that a supervisor handed down."""
    from socket import socket

    yield [socket(fileno=descriptor) for descriptor in descriptors]


def _known_recipes(
    names: Sequence[str], overrides: Sequence[str], store: Store, *, wait_s: float
) -> list[Recipe]:
    """Recipes of names, but for those of deployments that are yet to come."""
    from pipeline.errors import InvalidInput
    from pipeline.serving.deployments import find_deployment
    from pipeline.triton.running import SUPERVISED

    found = []
    for name in names:
        try:
            found.append(find_deployment(name, overrides, store, states=SUPERVISED).recipe)
        except InvalidInput:
            if not wait_s:
                raise
    return found


def require_packages(
    recipes: Sequence[Recipe], store: Store, traces: str | None, limits_redis: RedisAddress | None = None
) -> None:
    """Check that all packages for Python are there which a gateway needs.

    Args:
        recipes: What it serves.
        store: Of artifacts.
        traces: Where its spans go; None if the environment says so, or nowhere.
        limits_redis: Where it shares the limits of tenants; None if it does not.

    Raises:
        UserError: Some are missing; it names all of them.
    """
    from pipeline.cache.encryption import KEY
    from pipeline.gateway.traces import ENDPOINT_VARIABLES
    from pipeline.machine.packages import Need, require
    from pipeline.stages.response_cache import needs_of_cache

    needs = [Need("gateway", "the gateway")]
    needs += [Need("traces", "traces")] if traces or any(map(os.environ.get, ENDPOINT_VARIABLES)) else []
    if limits_redis:
        needs.append(Need("cache", "--limits-redis", frozenset({"redis"})))
        if os.environ.get(KEY) or any(recipe.cache.encryption for recipe in recipes):
            needs.append(Need("cache", "encryption", frozenset({"cryptography"})))
    needs += [need for recipe in recipes for need in needs_of_cache(recipe, store)]
    require("the gateway", needs)


def _prompt_log(which: str) -> PromptLog | None:
    from pipeline.gateway.prompt_log import PromptLog

    if which == "no":
        return None
    if which == "full":
        return PromptLog(None)
    from pipeline.cache.redaction import Redaction
    from pipeline.extras import missing

    try:
        return PromptLog(Redaction())
    except ImportError as error:
        raise missing("--log-prompts redacted", error, "cache") from error


def _advice(hosts: tuple[str, ...], *, keys: bool) -> str:
    """Options that a gateway which other machines reach should be started with, and is not."""
    lines = []
    if not hosts:
        lines.append("--allowed-host NAME: requests may name it by its IP addresses only")
    if not keys:
        lines.append("--keys FILE: whoever reaches it may ask")
    return "\n  ".join(["other machines reach this gateway; it was started without", *lines]) if lines else ""
