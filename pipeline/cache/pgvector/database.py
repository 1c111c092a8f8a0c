"""Connections to PostgreSQL whose failures are `BackendDown`, quickly: short timeouts, and a circuit breaker.

Written against psycopg 3.3.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipeline.cache.backend import PASSWORD, BackendDown, without_password
from pipeline.cache.circuit_breaker import CircuitBreaker, ServerUnreachable
from pipeline.extras import install_line

SCHEMES = ("postgresql", "postgres")
_ANSWER_S = 1.0
_OPTIONS = "-c synchronous_commit=off"  # what was put outlives the client; a crash of the server may cost the last ones
T = TypeVar("T")


class PostgresConnections:
    """A connection pool; safe to use from any number of threads. Nothing is connected before the first call."""

    def __init__(
        self, url: str, prepare: Callable[[Any], None], breaker: CircuitBreaker | None = None
    ) -> None:
        """
        Args:
            url: as libpq reads it, without a password.
            prepare: called with the first connection, before anything else, and again when what it made is gone.
            breaker: by default one of its own.

        Raises:
            ValueError: the address is malformed, or the distribution `psycopg` is missing.
        """
        try:
            import psycopg
        except ImportError as error:
            raise ValueError(f"{error}: the cache in PostgreSQL needs: {install_line('pgvector')}") from None
        self._psycopg = psycopg
        self._connect = _connection_class(psycopg).connect
        without_password(url)
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise ValueError(f"the address of the cache: {error}") from None
        parts = urlsplit(url)
        self.address = f"{parts.hostname or 'local'}:{parts.port or 5432}{parts.path}"
        self._url = url
        self._prepare = prepare
        self._breaker = breaker or CircuitBreaker()
        self._idle: list[Any] = []  # connections, the last used last
        self._lock = threading.Lock()
        self._prepared = False

    def do(self, work: Callable[[Any], T]) -> T:
        """Run `work` with a connection; twice if the first connection turns out to be dead.

        Raises:
            ServerUnreachable: the server cannot be reached or is too slow.
            BackendDown: it refused, or the breaker is open.
        """
        with self._breaker.attempt():
            try:
                pooled = self._take()
                if pooled is not None:
                    try:
                        return self._with(pooled, work)
                    except self._psycopg.OperationalError:
                        if not pooled.closed:
                            raise
                        self._discard()
                return self._with(self._new(), work)
            except (self._psycopg.OperationalError, TimeoutError) as error:
                raise ServerUnreachable(f"{self.address}: {_line(error)}") from error
            except self._psycopg.Error as error:
                if isinstance(
                    error, self._psycopg.ProgrammingError
                ):  # such as a schema that somebody dropped
                    self._prepared = False
                    self._discard()
                raise BackendDown(f"{self.address}: {_line(error)}") from error

    def close(self) -> None:
        """Close all connections."""
        self._discard()

    def _with(self, connection: Any, work: Callable[[Any], T]) -> T:
        try:
            return work(connection)
        finally:
            if not connection.closed:
                with self._lock:
                    self._idle.append(connection)

    def _take(self) -> Any | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _new(self) -> Any:
        connection = self._connect(
            self._url,
            password=os.environ.get(PASSWORD) or None,
            autocommit=True,
            connect_timeout=2,
            options=_OPTIONS,
            application_name="pipeline-cache",
        )
        with self._lock:
            if not self._prepared:
                try:
                    self._prepare(connection)
                except BaseException:
                    connection.close()
                    raise
                self._prepared = True
        return connection

    def _discard(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _connection_class(psycopg: Any) -> Any:
    """A connection that waits for an answer only so long: a server that hangs would keep it for ever."""

    class Impatient(psycopg.Connection):  # type: ignore[misc]
        def wait(self, generator: Any, interval: float = 0.1, timeout: float | None = None) -> Any:  # noqa: ARG002
            until = time.monotonic() + _ANSWER_S
            try:
                return super().wait(generator, interval, timeout=_ANSWER_S)
            except psycopg.OperationalError as error:
                if time.monotonic() < until:
                    raise
                self.pgconn.finish()  # what it still sends would be taken for the next answer
                raise TimeoutError(f"no answer within {_ANSWER_S:g} s") from error

    return Impatient


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
