"""The Redis or Valkey that several gateways share: one connection pool, short deadlines, a circuit breaker.

While the server does not answer, each gateway goes on by itself: nothing here waits for longer than the timeout. A
circuit breaker lets one request in a while find out whether the server is back.

Written against Redis 6.2 and newer, with redis-py 5 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.cache.backend import BackendDown
from pipeline.cache.circuit_breaker import CircuitBreaker, ServerUnreachable
from pipeline.cache.redis.server import RedisAddress

# Seconds: to connect, and for an answer. Short enough for a first token to wait for.
TIMEOUT_S = 0.25


class SharedRedis:
    """One server, for one event loop; nothing is connected before the first request."""

    def __init__(self, address: RedisAddress, *, timeout_s: float = TIMEOUT_S) -> None:
        """
        Args:
            address: of the server; the password is that of the environment.
            timeout_s: to connect, and for an answer.
        """
        from redis import asyncio as aioredis
        from redis import exceptions
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.address = address
        self._exceptions = exceptions
        self._breaker = CircuitBreaker()
        self.client: Any = aioredis.Redis(
            **address.options(),
            protocol=2,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            # A pooled connection may have been closed by the server since: that is tried again, a timeout is not.
            retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        )

    def script(self, text: str) -> Any:
        """Return a Lua script as a command for `run`."""
        return self.client.register_script(text)

    async def run(self, command: Any, keys: Sequence[str], words: Sequence[Any]) -> Any:
        """Run a command, and return what it returns.

        Args:
            command: takes `keys` and `args`; a script, for example.
            keys: that it touches.
            words: its arguments.

        Raises:
            BackendDown: the server does not answer in time, or fails.
        """
        errors = self._exceptions
        with self._breaker.attempt():
            try:
                return await command(keys=keys, args=words)
            except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
                raise ServerUnreachable(f"{self.address}: {error}") from error
            except errors.RedisError as error:
                raise BackendDown(f"{self.address}: {error}") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()
