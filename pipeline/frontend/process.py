"""Runs a gateway in this process, or in worker processes below it, until a signal ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from socket import socket
from typing import Any

from pipeline.cache.redis_server import RedisAddress
from pipeline.errors import UserError
from pipeline.extras import missing
from pipeline.frontend.models import (
    LocatedModel,
    load_served_model,
    locate_models,
    read_kv_cache_usage,
    record_followers,
)
from pipeline.gateway.access_log import log_to_stderr
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.client_connection import ConnectionLimits
from pipeline.gateway.context import GatewayParts
from pipeline.gateway.http_server import bound_sockets
from pipeline.gateway.records import PromptLog
from pipeline.gateway.settings import GatewaySettings, GatewayStart
from pipeline.gateway.shared_redis import RedisBuckets
from pipeline.gateway.state import open_state
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.traces import make_tracer
from pipeline.gateway.web import AllowedHosts
from pipeline.gateway.workers.pool import WorkerPool
from pipeline.gateway.workers.worker import GatewayWorker
from pipeline.private_files import owner_only
from pipeline.store import Store

# Command line of a process that gets a `GatewayStart`: the number of its descriptor follows.
CHILD = (sys.executable, "-m", "pipeline.cli.main", "gateway", "--child")
_WORKER = (*CHILD[:-1], "--worker")


def describe_models(start: GatewayStart) -> list[dict[str, Any]]:
    """Describe what a gateway would serve.

    Raises:
        PipelineError: Settings, recipes or keys have faults; see `locate_models` and `Tenants.load`.
    """
    _load_tenants(start.settings)
    located = locate_models(start, Store.at(start.store))
    _decide(start, located)
    return [model.describe() for model in located]


def serve_gateway(start: GatewayStart, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        start: Settings, and what the process above gave it.
        say: Gets the line that names its address, when it listens.
        warn: Gets advice on options that it should have been started with.

    Raises:
        PipelineError: Settings, recipes or keys have faults, or the address cannot be bound.
    """
    store, tenants = Store.at(start.store), _load_tenants(start.settings)
    with owner_only(), _listening(start) as sockets:
        located = locate_models(start, store)
        start = _decide(start, located)
        settings = start.settings
        log_to_stderr(as_json=settings.log_format == "json")
        if start.worker is None and (advice := _advice(settings, keys=tenants.require_keys)):
            warn(advice)
        names = [model.recipe.name for model in located]
        on_ready = partial(_say_ready, say, names, settings.host, sockets[0])
        if settings.workers > 1 and start.worker is None:
            WorkerPool(start, sockets, _WORKER, tenants, on_ready).run()
            return
        worker = None if start.worker is None else GatewayWorker.join(start.worker, tenants)
        load = partial(load_served_model, store=store, start=start, worker=worker)
        models = {model.recipe.name: load(model) for model in located}
        followers = record_followers(located, store, load)
        caches = [model.recipe.cache for model in located]
        # The parent of the workers removes the folder when all of them have ended.
        shared = None if worker is None else worker.place.metrics / "responses.sqlite"
        try:
            state = open_state(caches, settings, own_folder=store.root / "batches", responses_file=shared)
        except ValueError as error:
            raise UserError(f"files, batches and stored responses: {error}") from error
        redis = settings.limits_redis
        parts = GatewayParts(
            *state,
            followers=followers,
            kv_cache_usage=partial(read_kv_cache_usage, followers)
            if "vllm" in settings.metric_names
            else dict,
            worker=worker,
            tracer=make_tracer(settings.traces),
            prompt_log=_prompt_log(settings),
            buckets=None if redis is None else RedisBuckets(RedisAddress.parse(redis)),
        )
        limits = ConnectionLimits(connections=-(-settings.max_connections // settings.workers))
        gateway = Gateway(models, tenants, settings, parts)
        server = GatewayServer(gateway, settings.host, settings.port, limits=limits, drain_s=settings.drain_s)
        server.on_start = on_ready if worker is None else partial(worker.tell, "listens")
        server.run(sockets)


def _decide(start: GatewayStart, located: Sequence[LocatedModel]) -> GatewayStart:
    """Add the section that the recipes agree on, unless the process above did."""
    if not start.undecided:
        return start
    settings = GatewaySettings.of(start.settings, [model.recipe for model in located])
    return start.model_copy(update={"settings": settings, "undecided": False})


def _load_tenants(settings: GatewaySettings) -> Tenants:
    return Tenants() if settings.keys is None else Tenants.load(settings.keys)


@contextmanager
def _listening(start: GatewayStart) -> Iterator[list[socket]]:
    """Bind the sockets of a gateway, unless the process above did."""
    if start.sockets:
        yield [socket(fileno=descriptor) for descriptor in start.sockets]
        return
    with bound_sockets(start.settings.host, start.settings.port) as sockets:
        yield sockets


def _say_ready(say: Callable[[str], None], names: Sequence[str], host: str, listening: socket) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    say(f"gateway for {', '.join(names)}: {url}/v1   page: {url}/   stop: Ctrl-C")


def _prompt_log(settings: GatewaySettings) -> PromptLog | None:
    if settings.log_prompts is None:
        return None
    if settings.log_prompts == "full":
        return PromptLog(None)
    try:
        from pipeline.cache.redaction import Redaction

        return PromptLog(Redaction())
    except ImportError as error:
        raise missing("gateway.log_prompts: redacted", error, "cache") from error


def _advice(settings: GatewaySettings, *, keys: bool) -> str:
    """Name the options that a gateway which other machines reach should have, and has not."""
    if AllowedHosts(settings.host, settings.allowed_hosts).loopback:
        return ""
    lines = []
    if not settings.allowed_hosts:
        lines.append("--set gateway.allowed_hosts=[NAME]: requests may name it by its IP addresses only")
    if not keys:
        lines.append("--keys FILE: whoever reaches it may ask")
    return "\n  ".join(["other machines reach this gateway; it was started without", *lines]) if lines else ""
