"""The address of a Redis or Valkey server, and a connection pool whose failures are `BackendDown`, quickly.

Timeouts are short, and a circuit breaker spares requests a server that does not answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pipeline.cache.backend import PASSWORD, BackendDown, without_password
from pipeline.cache.packed_backend import CircuitBreaker, ServerUnreachable
from pipeline.extras import install_line

_PORT = 6379
_TLS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
SCHEMES = tuple(_TLS)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A server and one of its databases."""

    host: str
    port: int = _PORT
    database: int = 0
    tls: bool = False
    ca: str | None = None  # file of the authority that signed the server's certificate; the system's without
    user: str | None = None

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Read redis://[user@]host[:port][/database], rediss:// for TLS with ?ca=FILE; valkey:// is the same.

        Args:
            url: the address, without a password.

        Raises:
            ValueError: the address is malformed; the text says how, and never shows a password.

        >>> RedisAddress.parse("rediss://cache.internal/2?ca=/etc/ca.pem").database
        2
        """
        parts = urlsplit(without_password(url))
        faults = []
        if parts.scheme not in _TLS:
            faults.append(f"{parts.scheme}:// is none of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
        if not parts.hostname:
            faults.append("it names no host")
        database = parts.path.strip("/")
        if database and not database.isdecimal():
            faults.append(f"the database is a number, not {database}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        faults += [f"{name} is no option: only ca is" for name in options if name != "ca"]
        if "ca" in options and not _TLS.get(parts.scheme):
            faults.append("ca needs rediss:// or valkeys://")
        try:
            port = parts.port or _PORT
        except ValueError as error:
            port = 0
            faults.append(str(error))
        if faults:
            raise ValueError(f"{url}: {'; '.join(faults)}")
        return cls(
            parts.hostname or "",
            port,
            int(database or 0),
            _TLS[parts.scheme],
            options.get("ca"),
            parts.username,
        )

    def options(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return the arguments of `redis.Redis`; the password is that of the environment.

        Args:
            environ: environment variables, by default this process's; `PIPELINE_CACHE_PASSWORD` is read.
        """
        settings: dict[str, Any] = {"host": self.host, "port": self.port, "db": self.database}
        if self.user:
            settings["username"] = self.user
        if environ.get(PASSWORD):
            settings["password"] = environ[PASSWORD]
        if self.tls:
            settings |= {
                "ssl": True,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_ca_certs": self.ca,
            }
        return settings

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.database}"


_CONNECT_S = 0.5
_ANSWER_S = 1.0
T = TypeVar("T")
Script = Callable[[str, Sequence[Any]], Any]  # (key, arguments) -> reply


class RedisConnections:
    """A connection pool; safe to use from any number of threads. Nothing is connected before the first call."""

    def __init__(self, address: RedisAddress) -> None:
        """Raises ValueError if the distribution `redis` is missing."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError(
                f"{error}: the cache in Redis or Valkey needs: {install_line('cache')}"
            ) from None
        self.address = address
        self._breaker = CircuitBreaker()
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
        """Send one command. Raises ServerUnreachable, CommandRefused, or BackendDown while the breaker is open."""
        return self._do(lambda: self._client.execute_command(*command))

    def together(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send several commands at once, not as a transaction. Returns their replies."""

        def ask() -> list[Any]:
            pipeline: Any = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute()
            return replies

        return self._do(ask)

    def script(self, source: str) -> Script:
        """Register a Lua script. It is called with one key (which says where in a cluster it runs) and arguments."""
        registered = self._client.register_script(source)
        return lambda key, args: self._do(lambda: registered(keys=[key], args=args))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _do(self, ask: Callable[[], T]) -> T:
        errors = self._redis.exceptions
        with self._breaker.attempt():
            try:
                return ask()
            except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
                raise ServerUnreachable(f"{self.address}: {error}") from error
            except errors.RedisError as error:
                raise CommandRefused(f"{self.address}: {error}") from error


class CommandRefused(BackendDown):
    """The server answered, with an error."""
