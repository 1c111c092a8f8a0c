"""SQL databases of a gateway's state: the protocol, SQLite in a file or in memory, and PostgreSQL.

Statements are written once, in what SQLite 3.35 and PostgreSQL have in common, with `%s` for each value. `clock()`
is the database's own time, in seconds since the epoch: gateways that share the database need not agree about the time.
Tables are templates: `{serial}` is a key that rises with each row, `{blob}` the type of bytes.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from pipeline.cache.backend import BackendDown
from pipeline.cache.encryption import Codec
from pipeline.cache.postgres import PostgresConnections, make_once
from pipeline.gateway.errors import ApiError

_log = logging.getLogger("pipeline.gateway")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FULL = "53100"  # SQLSTATE of PostgreSQL
_RETRY_AFTER_S = 5.0
_LONGEST_ID = 128
SCHEMA = "pipeline_state_1"  # another version of the tables is another schema
_ANSWER_S = 10.0
# Locks and transactions that a stopped gateway holds end by themselves, before others have waited too long for them.
_OPTIONS = f"-c search_path={SCHEMA} -c lock_timeout=8s -c idle_in_transaction_session_timeout=5s"
_CLOCK = f"""
CREATE FUNCTION {SCHEMA}.clock() RETURNS double precision LANGUAGE sql AS
    'SELECT extract(epoch FROM clock_timestamp())::double precision';
"""
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"


class Cursor(Protocol):
    """Result of a statement, as of PEP 249."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


# Runs a statement in a transaction: the text, then its values.
Execute = Callable[..., Cursor]


class StateDatabase(Protocol):
    """Safe to use from any thread. All methods block."""

    @property
    def codec(self) -> Codec:
        """Seals what users wrote and models answered."""

    @property
    def in_use(self) -> bool:
        """Whether anything may be stored here."""

    def read(self, query: str, *values: Any) -> list[Any]:
        """Return the rows of a query.

        Raises:
            ApiError: 503, if the database cannot be used.
        """

    def transaction(self, lock: str) -> AbstractContextManager[Execute]:
        """Open a transaction, which is durable after the block, or undone if the block fails.

        Args:
            lock: name, such as that of a tenant; transactions of the same name come one after the other.

        Raises:
            ApiError: 503, if the database cannot be used; 507, if its disk is full.
        """

    def close(self) -> None:
        """Close all connections."""


class StorageFull(ApiError):
    """The disk is full, or its quota is used up. What was stored before is still there."""

    def __init__(self) -> None:
        super().__init__(507, "The server's disk is full; nothing was changed", code="storage_full")


class StorageFailed(ApiError):
    """The database or its folder cannot be used now."""

    def __init__(self) -> None:
        text = "What is stored cannot be read or written now; the server's log says why"
        super().__init__(503, text, code="storage_failed", retry_after_s=_RETRY_AFTER_S)


@contextmanager
def disk_errors(place: object) -> Iterator[None]:
    """Turn errors of the disk in the block into `StorageFull` or `StorageFailed`; `place` names it in the log."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        if full or (isinstance(error, OSError) and error.errno in _NO_SPACE):
            raise StorageFull from error
        _log.error("%s cannot be used: %s", place, error)
        raise StorageFailed from error


class ServerFaults:
    """Turns errors of a server of state into `ApiError`; the log says when they began, and when they ended.

    `subject` names what the server stores, for the log.
    """

    def __init__(self, subject: str) -> None:
        self._subject, self._fault = subject, ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a request to the server.

        Raises:
            ApiError: 503, if the server cannot be used; 507, if its disk is full.
        """
        try:
            yield
        except BackendDown as error:
            if getattr(error.__cause__, "sqlstate", None) == _DISK_FULL:
                raise StorageFull from error
            if not self._fault:
                _log.error("%s cannot be used: %s", self._subject, error)
            self._fault = str(error)
            raise StorageFailed from error
        if self._fault:
            self._fault = ""
            _log.warning("%s can be used again", self._subject)


class UnencryptedCodec:
    """Codec of what stays on this machine: not encrypted."""

    def seal(self, content: bytes, key: bytes) -> bytes:  # noqa: ARG002
        return content

    def open(self, kept: bytes | str, key: bytes) -> bytes:  # noqa: ARG002
        # Older folders of batches hold text.
        return kept.encode() if isinstance(kept, str) else kept


class SqliteDatabase:
    """See `StateDatabase`. All transactions come one after the other, also those of other processes."""

    codec: Codec = UnencryptedCodec()

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], place: object = "the memory of this process"
    ) -> None:
        """`connect` opens the database when it is used for the first time; `place` names it in the log."""
        self._connect, self._place = connect, place
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    @classmethod
    def in_memory(cls, tables: str) -> SqliteDatabase:
        """Make a database that ends with this process, with tables by a template."""

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.executescript(sqlite_tables(tables))
            return connection

        return cls(connect)

    @property
    def in_use(self) -> bool:
        return True

    def read(self, query: str, *values: Any) -> list[Any]:
        with disk_errors(self._place), self._lock:
            return _execute(self._connection())(query, *values).fetchall()

    @contextmanager
    def transaction(self, lock: str) -> Iterator[Execute]:  # noqa: ARG002
        with disk_errors(self._place), self._lock:
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield _execute(connection)
                connection.execute("COMMIT")
            except BaseException:
                # A full disk has ended the transaction already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def make(self) -> None:
        """Make the database now, if it is not there."""
        with disk_errors(self._place), self._lock:
            self._connection()

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = self._connect()
            self._opened.create_function("clock", 0, time.time)
        return self._opened


def sqlite_tables(template: str) -> str:
    """Return the SQL that makes tables in SQLite."""
    return template.format(serial="INTEGER PRIMARY KEY AUTOINCREMENT", blob="BLOB")


def known_form(id: str) -> str:
    """Return a text that users sent as an id if it may be one, else the empty text, which nothing has for its id.

    Databases refuse some texts, such as those with a zero character.
    """
    return id if len(id) <= _LONGEST_ID and id.isascii() and id.isprintable() else ""


def marks(values: Sequence[object]) -> str:
    """Return the placeholders of a list of values: `(%s, %s)`.

    >>> marks("ab")
    '(%s, %s)'
    """
    return f"({', '.join(['%s'] * len(values))})"


def _execute(connection: sqlite3.Connection) -> Execute:
    return lambda query, *values: connection.execute(query.replace("%s", "?"), values)


class PostgresDatabase:
    """State in PostgreSQL, which several gateways share. See `StateDatabase`.

    It needs no extension. Tables are made at the first use, in a schema of their own; the role therefore owns the
    database, or was granted CREATE there. The codec seals what users wrote and models answered. Commits wait for the
    server's disk. Written against PostgreSQL 18 and psycopg 3.3.
    """

    in_use = True

    def __init__(self, url: str, codec: Codec, tables: str) -> None:
        """
        Args:
            url: as libpq reads it, without a password. Nothing is connected before the first use.
            tables: templates of the tables.

        Raises:
            ValueError: the address is malformed, or the distribution `psycopg` is missing.
        """
        self.codec = codec
        statements = tables.format(serial="bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", blob="bytea")
        marker = f"{SCHEMA}.made"
        # The last table: whoever sees it sees all.
        statements = f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};{_CLOCK}{statements}CREATE TABLE {marker} ();"

        def prepare(connection: Any) -> None:
            if connection.execute("SELECT to_regclass(%s)", (marker,)).fetchone()[0] is None:
                make_once(connection, statements, unless=marker)

        self._connections = PostgresConnections(url, prepare, options=_OPTIONS, answer_s=_ANSWER_S)
        self._faults = ServerFaults(f"files, batches and stored responses at {self._connections.address}")

    def read(self, query: str, *values: Any) -> list[Any]:
        with self._faults.attempt():
            rows: list[Any] = self._connections.do(
                lambda connection: connection.execute(query, values).fetchall()
            )
            return rows

    def run(self, statement: str, *values: Any) -> None:
        """Run a statement by itself. It may be run twice, if a connection turns out to be dead."""
        with self._faults.attempt():
            self._connections.do(lambda connection: connection.execute(statement, values))

    @contextmanager
    def transaction(self, lock: str) -> Iterator[Execute]:
        begin: Callable[[Any], object] = lambda connection: connection.execute(_LOCK, (f"{SCHEMA} {lock}",))  # noqa: E731
        with self._faults.attempt(), self._connections.transaction(begin) as connection:
            yield lambda query, *values: connection.execute(query, values)

    def close(self) -> None:
        self._connections.close()
