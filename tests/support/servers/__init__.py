"""Real servers for tests, from wheels and from Debian: started on 127.0.0.1, stopped by their process ids."""

from __future__ import annotations

from tests.support.servers.install import Unavailable, installed
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.prometheus import prometheus_program, promtool
from tests.support.servers.redis import RedisServer
from tests.support.servers.running import Server

__all__ = [
    "PostgresServer",
    "RedisServer",
    "Server",
    "Unavailable",
    "installed",
    "prometheus_program",
    "promtool",
]
