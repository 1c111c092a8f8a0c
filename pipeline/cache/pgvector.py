"""Answers in PostgreSQL with the extension pgvector (0.8 or later): shared, durable, and searched by an HNSW index.

A put is one call of a function there. The extension, and a schema with tables and functions, are made at the first use.
The role therefore owns the database; or somebody ran `CREATE EXTENSION vector` there and granted it CREATE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

import numpy as np

from pipeline.cache.backend import (
    ALL_ENTRIES,
    ANY,
    BackendDown,
    Candidate,
    Capacity,
    EntryFilter,
    StoredEntry,
    Usage,
    Vector,
)
from pipeline.cache.encryption import Codec
from pipeline.cache.packed_backend import PackedBackend, PackedEntry, sql_where
from pipeline.cache.postgres import PostgresConnections, make_once
from pipeline.cache.vector_index import Row, ScopeIndexes

# Part of the schema's name: another version is another schema.
VERSION = 1
NAME = f"pipeline_cache_{VERSION}"
_STATEMENTS = (
    (files(__package__) / "data" / "pgvector.sql").read_text(encoding="utf-8").replace("{schema}", NAME)
)
# Entries that are read at a time.
_PAGE = 256
# pgvector: since then a search goes on until it has enough entries of the scope.
_OLDEST = (0, 8)


class PgvectorBackend(PackedBackend):
    """See `pipeline.cache.backend.Backend`.

    >>> cache = PgvectorBackend("postgresql://pipeline@db.internal/caches")     # doctest: +SKIP
    """

    remote = True

    def __init__(
        self,
        url: str,
        capacity: Capacity | None = None,
        *,
        name: str = "pipeline",
        codec: Codec | None = None,
    ) -> None:
        """
        Args:
            url: as libpq reads it, without a password.
            name: several caches in one database are kept apart by it.
            codec: encrypts entries; None: they are kept in the clear.

        Raises:
            ValueError: the address is malformed, or the distribution `psycopg` is missing.
        """
        super().__init__(capacity, codec)
        self._database = PostgresConnections(url, self._prepare)
        self._name = name
        self._indexes = ScopeIndexes(self._codec, self._read_after)
        # Dimensions of which there is an index.
        self._indexed: set[int] = set()

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """See `Backend.near`. The server's HNSW index finds them; if embeddings are encrypted, an index in memory."""
        if self._codec.sealed:
            return self._indexes.near(scope, vector, count, min_similarity, self._turns)
        rows = self._rows(
            f"SELECT key, turn, cosine FROM {NAME}.nearest(%s, %s, %s::halfvec, %s) WHERE cosine >= %s",
            self._name,
            scope,
            _text(vector),
            count,
            min_similarity,
        )
        return self._codec.candidates(rows)

    def remove(self, keys: Iterable[bytes]) -> int:
        return self._delete("key = ANY(%s)", list(keys))

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        condition, values = sql_where(which, "%s")
        return self._delete(condition, *values)

    def items(self) -> Iterator[StoredEntry]:
        below = 2**63 - 1
        while page := self._rows(
            "SELECT e.id, e.key, e.scope, e.engine, e.tenant, e.turn, e.answer, u.used,"
            f" num_nonnulls(e.near, e.sealed) > 0 FROM {NAME}.entries e JOIN {NAME}.uses u USING (id)"
            f" WHERE e.cache = %s AND e.id < %s ORDER BY e.id DESC LIMIT {_PAGE}",
            self._name,
            below,
        ):
            for _, key, scope, engine, tenant, turn, answer, used, embedded in page:
                opened = self._codec.both(turn, answer, key)
                if opened is not None:
                    yield StoredEntry(key, scope, engine, tenant, *opened, used, embedded)
            below = page[-1][0]

    def removals(self) -> int:
        row = self._row(f"SELECT removals FROM {NAME}.totals WHERE cache = %s", self._name)
        return 0 if row is None else int(row[0])

    def usage(self) -> Usage:
        row = self._row(
            f"SELECT entries, bytes, vectors, (SELECT min(created) FROM {NAME}.entries e WHERE e.cache = t.cache)"
            f" FROM {NAME}.totals t WHERE cache = %s",
            self._name,
        )
        return Usage(0, 0, 0, None) if row is None else Usage(*row)

    def describe(self) -> Mapping[str, str]:
        row = self._row(
            "SELECT current_setting('server_version'), extversion FROM pg_extension WHERE extname = 'vector'"
        )
        server, extension = row or ("unknown", "unknown")
        return {
            "kind": "pgvector",
            "server": self._database.address,
            "name": self._name,
            "schema": str(VERSION),
            "version": f"PostgreSQL {server}, pgvector {extension}",
            "embeddings": "indexed in memory" if self._codec.sealed else "HNSW",
        }

    def close(self) -> None:
        """Write when entries were last used, if the server can be reached, and close the connections."""
        with suppress(BackendDown):
            self._flush()
        self._database.close()

    def _answer(self, key: bytes) -> bytes | None:
        row = self._row(f"SELECT answer FROM {NAME}.entries WHERE cache = %s AND key = %s", self._name, key)
        return None if row is None else row[0]

    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        self._flush()
        self._row(
            f"SELECT {NAME}.put(%s, %s, %s, %s, %s, %s, %s, %s::halfvec, %s, %s, %s, %s, %s, %s)",
            self._name,
            packed.key,
            packed.scope,
            packed.engine,
            packed.tenant,
            packed.turn,
            packed.answer,
            *self._embedding(packed, vector),
            packed.created,
            packed.expires,
            packed.size,
            self._capacity.entries,
            self._capacity.bytes,
        )

    def _prepare(self, connection: Any) -> None:
        """Make the tables if they are not there, and refuse a pgvector that is too old."""
        self._indexed.clear()
        if connection.execute("SELECT to_regclass(%s)", (f"{NAME}.uses",)).fetchone()[0] is None:
            make_once(connection, _STATEMENTS, unless=f"{NAME}.uses")
        query = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        (version,) = connection.execute(query).fetchone()
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            wanted = ".".join(map(str, _OLDEST))
            raise BackendDown(f"the server has pgvector {version}: the cache needs {wanted} or later")

    def _embedding(self, packed: PackedEntry, vector: Vector | None) -> tuple[str | None, bytes | None]:
        if vector is None or self._codec.sealed:
            return None, packed.vector
        if len(vector) not in self._indexed:
            self._database.do(lambda connection: make_once(connection, _index(len(vector))))
            self._indexed.add(len(vector))
        return _text(vector), None

    def _turns(self, ids: Sequence[int]) -> list[tuple[bytes, bytes] | None]:
        rows = self._rows(f"SELECT id, key, turn FROM {NAME}.entries WHERE id = ANY(%s)", list(ids))
        known = {id: (key, turn) for id, key, turn in rows}
        return [known.get(id) for id in ids]

    def _read_after(self, scope: bytes, after: int, limit: int) -> Sequence[Row]:
        return self._rows(
            f"SELECT id, key, sealed FROM {NAME}.entries"
            " WHERE cache = %s AND scope = %s AND id > %s AND sealed IS NOT NULL ORDER BY id LIMIT %s",
            self._name,
            scope,
            after,
            limit,
        )

    def _flush(self) -> None:
        if touched := self._access_times.take():
            self._change(
                f"UPDATE {NAME}.uses u SET used = t.used FROM {NAME}.entries e,"
                " unnest(%s::bytea[], %s::float8[]) AS t (key, used)"
                " WHERE e.cache = %s AND e.key = t.key AND u.id = e.id AND u.used < t.used",
                list(touched),
                list(touched.values()),
                self._name,
            )

    def _delete(self, condition: str, *values: object) -> int:
        return self._change(
            f"DELETE FROM {NAME}.entries WHERE cache = %s AND {condition}", self._name, *values
        )

    def _change(self, statement: str, *values: object) -> int:
        """Return how many rows a statement changed. One change to a cache at a time."""

        def work(connection: Any) -> int:
            with connection.transaction():
                connection.execute(f"SELECT {NAME}.change(%s)", (self._name,))
                return int(connection.execute(statement, values).rowcount)

        return self._database.do(work)

    def _row(self, statement: str, *values: object) -> Any:
        return self._database.do(lambda connection: connection.execute(statement, values).fetchone())

    def _rows(self, statement: str, *values: object) -> list[Any]:
        rows: list[Any] = self._database.do(
            lambda connection: connection.execute(statement, values).fetchall()
        )
        return rows


def _text(vector: Vector) -> str:
    """Text that pgvector reads, of the 16 bits that it keeps."""
    return f"[{','.join(map(str, np.asarray(vector, np.float16).tolist()))}]"


def _index(dimensions: int) -> str:
    """Statement that makes the index of embeddings of a length, if it is not there."""
    return (
        f"CREATE INDEX IF NOT EXISTS near_{dimensions} ON {NAME}.entries"
        f" USING hnsw ((near::halfvec({dimensions})) halfvec_cosine_ops) WITH (m = 16, ef_construction = 128)"
        f" WHERE vector_dims(near) = {dimensions}"
    )
