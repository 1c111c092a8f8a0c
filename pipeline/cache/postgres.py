"""Connections to PostgreSQL whose failures are `BackendDown`, quickly: short timeouts, and a circuit breaker.

Written against psycopg 3.3.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipeline.cache.backend import PASSWORD, BackendDown, without_password
from pipeline.cache.circuit_breaker import CircuitBreaker, ServerUnreachable
from pipeline.extras import install_line

SCHEMES = ("postgresql", "postgres")
_ANSWER_S = 1.0
# A put outlives the client; a crash of the server may cost the last ones.
_OPTIONS = "-c synchronous_commit=off"
# Advisory lock, held while a schema or an index is made.
_MAKING = 4_158_230_117
_THERE = (
    "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s"
)
# Classes of SQLSTATE with which a connection ends: connection exceptions, and a server that is shut down.
_ENDING = ("08", "57P")
T = TypeVar("T")


class PostgresConnections:
    """A connection pool; safe to use from any number of threads. Nothing is connected before the first call."""

    def __init__(
        self,
        url: str,
        prepare: Callable[[Any], None],
        *,
        options: str = _OPTIONS,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """
        Args:
            url: as libpq reads it, without a password.
            prepare: called with the first connection, before anything else, and again when what it made is gone.
            options: settings of the server for each connection.
            answer_s: limit of a statement, in seconds.

        Raises:
            ValueError: the address is malformed, or the distribution `psycopg` is missing.
        """
        try:
            import psycopg
        except ImportError as error:
            raise ValueError(f"{error}: the cache in PostgreSQL needs: {install_line('pgvector')}") from None
        self._psycopg = psycopg
        self._options = options
        self._connect = _connection_class(psycopg, answer_s).connect
        without_password(url)
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise ValueError(f"the address of the cache: {error}") from None
        parts = urlsplit(url)
        self.address = f"{parts.hostname or 'local'}:{parts.port or 5432}{parts.path}"
        self._url = url
        self._prepare = prepare
        self._breaker = CircuitBreaker()
        # Connections, the last used last.
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._prepared = False

    def do(self, work: Callable[[Any], T]) -> T:
        """Run `work` with a connection; twice if the first connection turns out to be dead.

        Raises:
            ServerUnreachable: the server cannot be reached or is too slow.
            BackendDown: it refused, or the breaker is open.
        """
        with self._failures():
            connection, result = self._first(work)
            self._give_back(connection)
            return result

    @contextmanager
    def transaction(self, begin: Callable[[Any], object]) -> Iterator[Any]:
        """Open a transaction that is committed after the block, or undone if the block fails.

        Args:
            begin: called first in the transaction; twice if the first connection turns out to be dead.

        Yields:
            The connection.

        Raises:
            ServerUnreachable: the server cannot be reached or is too slow.
            BackendDown: it refused, or the breaker is open.
        """

        def opened(connection: Any) -> None:
            connection.execute("BEGIN")
            begin(connection)

        with self._failures():
            connection, _ = self._first(opened)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self._undo(connection)
                raise
            self._give_back(connection)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise the errors of psycopg as `BackendDown`, and hold the block to the circuit breaker."""
        with self._breaker.attempt():
            try:
                yield
            except (self._psycopg.OperationalError, TimeoutError) as error:
                state = getattr(error, "sqlstate", None)
                if state is not None and not state.startswith(_ENDING):
                    # It answered: a lock that somebody else holds, a full disk.
                    raise BackendDown(f"{self.address}: {_line(error)}") from error
                raise ServerUnreachable(f"{self.address}: {_line(error)}") from error
            except self._psycopg.Error as error:
                if isinstance(error, self._psycopg.ProgrammingError):
                    # Such as a schema that somebody dropped.
                    self._prepared = False
                    self.close()
                raise BackendDown(f"{self.address}: {_line(error)}") from error

    def _first(self, work: Callable[[Any], T]) -> tuple[Any, T]:
        """Run `work` with a connection, and again with a new one if the first, a pooled one, turns out to be dead."""
        pooled = self._take()
        connection = self._new() if pooled is None else pooled
        while True:
            try:
                return connection, work(connection)
            except BaseException as error:
                lost = isinstance(error, self._psycopg.OperationalError) and connection.closed
                if connection is not pooled or not lost:
                    self._undo(connection)
                    raise
            self.close()
            connection = self._new()

    def _undo(self, connection: Any) -> None:
        """End a transaction that failed, if there is one."""
        if not connection.closed:
            try:
                connection.execute("ROLLBACK")
            except (self._psycopg.Error, TimeoutError):
                connection.close()
        self._give_back(connection)

    def _give_back(self, connection: Any) -> None:
        if not connection.closed:
            with self._lock:
                self._idle.append(connection)

    def _take(self) -> Any | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _new(self) -> Any:
        # libpq's own variable comes first: the same gateway may reach a Redis server with another password.
        password = None if os.environ.get("PGPASSWORD") else os.environ.get(PASSWORD) or None
        connection = self._connect(
            self._url,
            password=password,
            autocommit=True,
            connect_timeout=2,
            options=self._options,
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

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _connection_class(psycopg: Any, answer_s: float) -> Any:
    """Make a class of connections that wait for an answer only so long: a server that hangs would keep them."""

    class ConnectionWithDeadline(psycopg.Connection):  # type: ignore[misc]
        def wait(self, generator: Any, interval: float = 0.1, timeout: float | None = None) -> Any:  # noqa: ARG002
            until = time.monotonic() + answer_s
            try:
                return super().wait(generator, interval, timeout=answer_s)
            except psycopg.OperationalError as error:
                if time.monotonic() < until:
                    raise
                # A late answer would be taken for the next one.
                self.pgconn.finish()
                raise TimeoutError(f"no answer within {answer_s:g} s") from error

    return ConnectionWithDeadline


def make_once(connection: Any, statements: str, unless: str = "") -> None:
    """Run statements that several processes may come to at once; not if the relation `unless` is there by then.

    That is read from the catalog itself: `to_regclass` may answer from what the session kept of it before the lock.
    """
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = on")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
        if not (unless and connection.execute(_THERE, unless.split(".")).fetchone()):
            connection.execute(statements)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
