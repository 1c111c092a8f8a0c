"""State in PostgreSQL, which several gateways share. It needs no extension.

Tables are made at the first use, in a schema of their own; the role therefore owns the database, or was granted CREATE
there. The codec seals what users wrote and models answered. Commits wait for the server's disk.

Written against PostgreSQL 18 and psycopg 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.cache.encryption import Codec
from pipeline.cache.postgres import PostgresConnections, make_once
from pipeline.gateway.state.database import Execute, ServerFaults

SCHEMA = "pipeline_state_1"  # another version of the tables is another schema
_ANSWER_S = 10.0
# Locks and transactions that a stopped gateway holds end by themselves, before others have waited too long for them.
_OPTIONS = f"-c search_path={SCHEMA} -c lock_timeout=8s -c idle_in_transaction_session_timeout=5s"
_CLOCK = f"""
CREATE FUNCTION {SCHEMA}.clock() RETURNS double precision LANGUAGE sql AS
    'SELECT extract(epoch FROM clock_timestamp())::double precision';
"""
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"


class PostgresDatabase:
    """See `StateDatabase`."""

    in_use = True

    def __init__(self, url: str, codec: Codec, tables: str) -> None:
        """
        Args:
            url: as libpq reads it, without a password. Nothing is connected before the first use.
            codec: seals what is stored.
            tables: templates of the tables.

        Raises:
            ValueError: the address is malformed, or the distribution `psycopg` is missing.
        """
        self.codec = codec
        statements = tables.format(serial="bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", blob="bytea")
        made = f"{SCHEMA}.made"
        # The last table: whoever sees it sees all.
        statements = f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};{_CLOCK}{statements}CREATE TABLE {made} ();"

        def prepare(connection: Any) -> None:
            if connection.execute("SELECT to_regclass(%s)", (made,)).fetchone()[0] is None:
                make_once(connection, statements, unless=made)

        self._connections = PostgresConnections(url, prepare, options=_OPTIONS, answer_s=_ANSWER_S)
        self._faults = ServerFaults(f"files, batches and stored responses at {self._connections.address}")

    def read(self, query: str, *values: Any) -> list[Any]:
        with self._faults.attempt():
            rows: list[Any] = self._connections.do(
                lambda connection: connection.execute(query, values).fetchall()
            )
            return rows

    def write(self, statement: str, *values: Any) -> None:
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
