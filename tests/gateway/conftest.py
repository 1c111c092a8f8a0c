"""A gateway on a free port in front of a scripted model server."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client.testing import Received, Reply
from pipeline.gateway.api.batches import runner
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.api.responses.stored import StoredResponses
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.client_connection import ConnectionLimits
from pipeline.gateway.context import GatewayParts
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.records import PromptLog
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.shared_redis import RedisBuckets
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.traces import Tracer
from pipeline.recipe.deployment import MetricNames
from tests.support.http_clients import http, openai_client
from tests.support.scripted_model import Upstream, tiny
from tests.support.servers import Servers, started_servers
from tests.support.state_places import StatePlace
from tests.support.waiting import wait_for


class Running:
    """The gateway, what stands behind it, and a client in front."""

    def __init__(self, server: GatewayServer, upstream: Upstream, gateway: Gateway, stack: ExitStack) -> None:
        self.server, self.upstream, self.gateway, self._stack = server, upstream, gateway, stack
        self.url = server.url
        self.served = gateway.models["tiny"]
        self._clients: dict[str, openai.OpenAI] = {}

    def lend(self, stack: ExitStack) -> None:
        """Close clients with another stack from now on."""
        self._stack, self._clients = stack, {}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of the page at /metrics with a name and these labels."""
        families = text_string_to_metric_families(http.get(f"{self.url}/metrics").text)
        found = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in found if sample.labels.items() >= labels.items())

    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.served.queue.running == 0 and not self.upstream._open

    def client(self, key: str = "none") -> openai.OpenAI:
        return self._stack.enter_context(openai_client(self.url, key))

    def same_client(self, key: str = "none") -> openai.OpenAI:
        """One client for all that a test asks: making one takes longer than an answer."""
        return self._clients.get(key) or self._clients.setdefault(key, self.client(key))


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with started_servers() as servers:
        yield servers


@contextmanager
def opened_place(kind: str, folder: Path, servers: Servers) -> Iterator[StatePlace]:
    """A place of state of a kind, until the block ends."""
    names = {"postgres": "pgvector"}
    on_server = kind in ("postgres", "redis", "valkey")
    place = StatePlace(kind, folder, servers.running(names.get(kind, kind)) if on_server else None)
    try:
        yield place
    finally:
        place.close()


def keyed(*names: str, limits: TenantLimits | None = None) -> Tenants:
    """Tenants whose keys are their names."""
    made = {name: Tenant(name, limits or TenantLimits()) for name in names}
    return Tenants({sha256(name.encode()).hexdigest(): tenant for name, tenant in made.items()})


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only how often the runner of batches looks; it goes by the state that it finds."""
    monkeypatch.setattr(runner, "_POLL_S", 0.05)
    monkeypatch.setattr(runner, "_RETRY_S", 0.05)


def places(*kinds: str) -> list[Any]:
    """Parameters of a fixture: those that need a server are tests of that tier."""
    local = ("memory", "folder")
    return [kind if kind in local else pytest.param(kind, marks=pytest.mark.servers) for kind in kinds]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield starter(tmp_path, stack)


@pytest.fixture(scope="module")
def shared_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Of gateways that all tests of a file may use."""
    with ExitStack() as stack:
        yield starter(tmp_path_factory.mktemp("gateway"), stack)


@pytest.fixture(scope="module")
def idle() -> defaultdict[tuple[Any, ...], list[Running]]:
    """Gateways of a file that no test uses at the moment, by their settings."""
    return defaultdict(list)


@pytest.fixture
def borrow(shared_start: Start, idle: defaultdict[tuple[Any, ...], list[Running]]) -> Iterator[Start]:
    """Like `start`, but with a gateway that an earlier test of the file has used, if its settings were the same.

    For tests that leave a gateway as it was: they lose no server, read no counts, and cache nothing.
    """
    used: list[tuple[list[Running], Running]] = []
    with ExitStack() as stack:

        def borrow(reply: Any = None, **settings: Any) -> Running:
            free = idle[tuple(sorted(settings.items()))]
            running = free.pop() if free else shared_start(**settings)
            wait_for(lambda: running.served.readiness.fault is None, "a model that is ready", 60)
            running.upstream.begin(reply or Reply())
            running.lend(stack)
            used.append((free, running))
            return running

        yield borrow
    for free, running in used:
        wait_for(running.is_idle, "the end of all requests", 60)
        free.append(running)


@pytest.fixture(scope="module")
def refusing(shared_start: Start) -> Iterator[Running]:
    """A gateway whose model must never be asked."""
    running = shared_start()
    yield running
    assert not running.upstream.requests


def starter(folder: Path, stack: ExitStack) -> Start:
    """Starts gateways, which end with `stack`."""

    def start(
        reply: Reply | Sequence[Reply] | Callable[[Received], Reply] | None = None,
        *,
        upstream: Upstream | None = None,
        tenants: Tenants | None = None,
        cached: bool = False,
        model: Any = None,
        tracer: Tracer | None = None,
        prompt_log: PromptLog | None = None,
        limits: ConnectionLimits | None = None,
        origins: Sequence[str] = (),
        metric_names: tuple[MetricNames, ...] = (),
        kv_cache_usage: Callable[[], Mapping[str, float]] = dict,
        also: Sequence[str] = (),
        urls: Sequence[str] = (),
        followers: Callable[[str], Sequence[RecordFollower]] = lambda _: (),
        batches: BatchStorage | None = None,
        stored_responses: StoredResponses | None = None,
        buckets: RedisBuckets | None = None,
        max_body_bytes: int = 10_000,
        **settings: Any,
    ) -> Running:
        upstream = upstream or stack.enter_context(Upstream(reply or Reply(), model=model))
        cache = ResponseCache(SqliteBackend(folder / "cache.db")) if cached else None
        served = tiny(urls or [upstream.url, *also], cache=cache, **settings)
        gateway = Gateway(
            {"tiny": served},
            tenants or Tenants(),
            GatewaySettings(allowed_origins=tuple(origins), metric_names=metric_names),
            GatewayParts(
                batches=batches,
                stored_responses=stored_responses,
                followers=followers(upstream.url),
                kv_cache_usage=kv_cache_usage,
                tracer=tracer or Tracer(),
                prompt_log=prompt_log,
                buckets=buckets,
            ),
            max_body_bytes=max_body_bytes,
        )
        server = GatewayServer(gateway, "127.0.0.1", 0, limits=limits or ConnectionLimits(), drain_s=2)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_for(lambda: server.started, "the start of the gateway", 60)

        def stop() -> None:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()

        stack.callback(stop)
        return Running(server, upstream, gateway, stack)

    return start
