"""A connection pool whose failures are `BackendDown`, quickly: short timeouts, and a rest after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipeline.cache.backend import BackendDown
from pipeline.cache.circuit_breaker import Rest, Unanswered
from pipeline.cache.redis.address import Address
from pipeline.extras import install_line

_CONNECT_S = 0.5
_ANSWER_S = 1.0
T = TypeVar("T")
Script = Callable[[str, Sequence[Any]], Any]  # (key, arguments) -> reply


class Server:
    """Safe to use from any number of threads. Nothing is connected before the first call."""

    def __init__(self, address: Address, rest: Rest | None = None) -> None:
        """ValueError if the distribution `redis` is missing."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError(
                f"{error}: the cache in Redis or Valkey needs: {install_line('cache')}"
            ) from None
        self.address = address
        self._rest = rest or Rest()
        self._redis = redis
        self._client: Any = redis.Redis(
            **address.options(),
            protocol=2,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            socket_keepalive=True,
            # A pooled connection may have been closed by the server since: that is tried again, a timeout is not.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        )

    def call(self, *command: Any) -> Any:
        """The reply to one command. Raises Unanswered, Refused, or BackendDown while the server rests."""
        return self._do(lambda: self._client.execute_command(*command))

    def together(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The replies to several commands that are sent at once; not a transaction."""

        def ask() -> list[Any]:
            pipeline: Any = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute()
            return replies

        return self._do(ask)

    def script(self, source: str) -> Script:
        """A Lua script, to be called with one key (which says where in a cluster it runs) and arguments."""
        registered = self._client.register_script(source)
        return lambda key, args: self._do(lambda: registered(keys=[key], args=args))

    def close(self) -> None:
        """Give up all connections."""
        self._client.close()

    def _do(self, ask: Callable[[], T]) -> T:
        errors = self._redis.exceptions
        with self._rest.attempt():
            try:
                return ask()
            except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
                raise Unanswered(f"{self.address}: {error}") from error
            except errors.RedisError as error:
                raise Refused(f"{self.address}: {error}") from error


class Refused(BackendDown):
    """The server answered, with an error."""
