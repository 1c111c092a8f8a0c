"""Each backend, with a real server where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import cache_places as places
from tests.support.servers import SERVERS, Servers, started_servers

PLACES: dict[str, Callable[[Any], places.Place]] = {
    "redis": places.redis,
    "redis-query-engine": places.redis,
    "valkey": places.redis,
    "pgvector": places.pgvector,
}


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with started_servers() as servers:
        yield servers


_SERVED = [pytest.param(kind, marks=pytest.mark.servers) for kind in SERVERS]


@pytest.fixture(params=["sqlite", "memory", *_SERVED])
def place(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[places.Place]:
    """A cache of each kind."""
    kind = request.param
    if kind == "sqlite":
        made = places.sqlite(tmp_path)
    elif kind == "memory":
        made = places.in_memory()
    else:
        made = PLACES[kind](servers.running(kind))
    yield made
    for backend in made.opened:
        backend.close()


@pytest.fixture(params=_SERVED)
def served(request: pytest.FixtureRequest, servers: Servers) -> Iterator[places.Place]:
    """A cache in each kind of server."""
    made = PLACES[request.param](servers.running(request.param))
    yield made
    assert made.server is not None
    made.server.resume()
    for backend in made.opened:
        backend.close()
