"""Real servers for tests: put on this machine from wheels, started on 127.0.0.1, stopped by their process ids."""

from __future__ import annotations

from tests.support.servers.install import Unavailable, installed
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.running import Server

__all__ = ["PostgresServer", "RedisServer", "Server", "Unavailable", "installed"]
