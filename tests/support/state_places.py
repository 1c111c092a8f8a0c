"""Places in which gateways keep files, batches and stored responses: how a gateway opens each, and what lies there."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.cache.encryption import Codec, PlainCodec
from pipeline.cache.redis_server import RedisAddress
from pipeline.gateway.api.batches.places import (
    BATCH_TABLES,
    CONTENT_TABLES,
    BatchFolder,
    PostgresBatches,
)
from pipeline.gateway.api.batches.storage import BatchStorage, StorageLimits
from pipeline.gateway.api.responses.redis import RedisStoredResponses
from pipeline.gateway.api.responses.stored import (
    RESPONSE_TABLES,
    SqlStoredResponses,
    StoredResponseLimits,
    StoredResponses,
)
from tests.support.cache_places import postgres_rows, redis_client, redis_values
from tests.support.servers import Server

_databases = count()


@dataclass
class StatePlace:
    """One place that no other test uses.

    Attributes:
        kind: memory, folder, redis, valkey or postgres.
        folder: for what lies on this machine.
        server: that has it, or None.
        now: time that stored responses go by (s since the epoch); None for the real one.
    """

    kind: str
    folder: Path
    server: Server | None = None
    now: float | None = None
    _opened: list[BatchStorage | StoredResponses] = field(default_factory=list)
    _url: str = ""

    @property
    def url(self) -> str:
        """Address of the server."""
        if not self._url:
            assert self.server is not None
            self._url = _fresh(self.kind, self.server)
        return self._url

    def batches(self, limits: StorageLimits | None = None, codec: Codec | None = None) -> BatchStorage:
        """Open it as one more gateway."""
        limits = limits or StorageLimits()
        if self.kind == "folder":
            made = BatchStorage(BatchFolder(self.folder / "batches"), limits)
        else:
            made = BatchStorage(self._database(codec), limits)
        self._opened.append(made)
        return made

    def responses(
        self, limits: StoredResponseLimits | None = None, codec: Codec | None = None
    ) -> StoredResponses:
        """Open it as one more gateway; the memory of a process has one only."""
        made: Any
        limits = limits or StoredResponseLimits()
        if self.kind in ("memory", "folder"):
            if self.kind == "memory" and self._opened:
                return self._opened[0]  # type: ignore[return-value]
            file = None if self.kind == "memory" else self.folder / "responses.sqlite"
            made = SqlStoredResponses.of_gateway(limits, file)
            made._clock = self._clock
        elif self.kind == "postgres":
            made = SqlStoredResponses(self._database(codec), limits, self._clock)
        else:
            made = RedisStoredResponses(
                RedisAddress.parse(self.url), codec or PlainCodec(), limits, self._clock
            )
        self._opened.append(made)
        return made

    def raw(self) -> bytes:
        """Everything that is stored, names included."""
        if self.kind == "folder":
            with closing(sqlite3.connect(self.folder / "responses.sqlite")) as file:
                return repr(file.execute("SELECT * FROM responses").fetchall()).encode()
        if self.kind == "postgres":
            return postgres_rows(self.url, "pipeline_state_1")
        return redis_values(self.url)

    def close(self) -> None:
        """Close all that was opened."""
        for opened in self._opened:
            opened.close()

    @property
    def first(self) -> Any:
        """What was opened first, or None."""
        return next(iter(self._opened), None)

    def _clock(self) -> float:
        return time.time() if self.now is None else self.now

    def _database(self, codec: Codec | None) -> PostgresBatches:
        return PostgresBatches(
            self.url, codec or PlainCodec(), BATCH_TABLES + CONTENT_TABLES + RESPONSE_TABLES
        )


def _fresh(kind: str, server: Any) -> str:
    """Address of a database without anything in it."""
    url: str = server.url
    if kind != "postgres":
        client = redis_client(url)
        client.flushall()
        client.close()
        return url
    import psycopg

    name = f"state_{next(_databases)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return url.rpartition("/")[0] + f"/{name}"
