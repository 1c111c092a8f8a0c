"""Servers of a test run, each started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.servers.install import Unavailable
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.running import Server

SERVERS: dict[str, Callable[[], Server]] = {
    "redis": lambda: RedisServer(),
    "redis-query-engine": lambda: RedisServer(search=True),
    "valkey": lambda: RedisServer("valkey"),
    "pgvector": PostgresServer,
}


class Servers:
    """See the module."""

    def __init__(self, exit: ExitStack) -> None:
        self._exit = exit
        self._running: dict[str, Server | Unavailable] = {}

    def running(self, kind: str) -> Server:
        """The server of a kind; the test is skipped where there is none."""
        if kind not in self._running:
            try:
                self._running[kind] = self._exit.enter_context(SERVERS[kind]())
            except Unavailable as error:
                self._running[kind] = error
        server = self._running[kind]
        if isinstance(server, Unavailable):
            pytest.skip(f"no server of {kind} here: {server}")
        return server


@contextmanager
def started_servers() -> Iterator[Servers]:
    """Servers that end with the block."""
    with ExitStack() as exit:
        yield Servers(exit)
