"""Where a backend of the contract tests keeps its entries: how to open it, look into it, and damage it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.cache.backend import Backend, Capacity
from pipeline.cache.backends import file_of, open_backend
from pipeline.cache.encryption import Codec
from tests.support.servers import Server

_names = count()


@dataclass
class Place:
    """One cache, that no other test uses; `kind` is memory, sqlite, redis or pgvector."""

    kind: str
    url: str
    server: Server | None = None
    name: str = field(default_factory=lambda: f"cache-{next(_names)}")
    opened: list[Backend] = field(default_factory=list)
    in_memory: dict[str, Backend] = field(default_factory=dict)

    def open(self, capacity: Capacity | None = None, codec: Codec | None = None, name: str = "") -> Backend:
        name = name or self.name
        if self.kind == "memory":
            backend = self.in_memory.setdefault(name, open_backend(self.url, capacity))
        else:
            backend = open_backend(self.url, capacity, name=name, codec=codec)
        self.opened.append(backend)
        return backend

    @property
    def is_shared(self) -> bool:
        """Whether other processes can use it."""
        return self.kind != "memory"

    def raw(self) -> bytes:
        """Everything that is stored there."""
        if self.kind == "sqlite":
            file = file_of(self.url)
            return b"".join(path.read_bytes() for path in sorted(file.parent.glob(file.name + "*")))
        if self.kind == "pgvector":
            return postgres_rows(self.url, "pipeline_cache_1")
        assert self.kind == "redis"
        return redis_values(self.url)

    def is_whole(self) -> bool:
        """Whether SQLite can read a file to its end; servers look after their own."""
        if self.kind != "sqlite":
            return True
        with closing(sqlite3.connect(file_of(self.url))) as connection:
            return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))

    def damage(self, key: bytes) -> None:
        """Change a byte of an answer."""
        if self.kind == "sqlite":
            connection = sqlite3.connect(file_of(self.url))
            with connection:
                (kept,) = connection.execute("SELECT answer FROM entries WHERE key = ?", (key,)).fetchone()
                connection.execute("UPDATE entries SET answer = ? WHERE key = ?", (_damaged(kept), key))
            connection.close()
        elif self.kind == "pgvector":
            import psycopg

            entries, one, where = "pipeline_cache_1.entries", "cache = %s AND key = %s", (self.name, key)
            with psycopg.connect(self.url) as connection:
                query = f"SELECT answer FROM {entries} WHERE {one}"
                (kept,) = connection.execute(query, where).fetchone() or (b"",)
                connection.execute(f"UPDATE {entries} SET answer = %s WHERE {one}", (_damaged(kept), *where))
        else:
            assert self.kind == "redis"
            client = redis_client(self.url)
            at = f"pipeline:{{{self.name}}}:entry:".encode() + key
            client.hset(at, "answer", _damaged(client.hget(at, "answer")))
            client.close()


def postgres_rows(url: str, schema: str) -> bytes:
    """The values of all rows of a schema's tables."""
    import psycopg

    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)
        ).fetchall()
        rows = [
            row
            for (name,) in names
            for row in connection.execute(f"SELECT * FROM {schema}.{name}").fetchall()
        ]
    return b"\n".join(
        value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row
    )


def redis_values(url: str) -> bytes:
    """Everything in a database of Redis, keys included."""
    client = redis_client(url)
    readers: dict[bytes, Any] = {
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"string": client.get,
        b"set": client.smembers,
        # Keys may run out meanwhile.
        b"none": lambda _: None,
    }
    found = b"\n".join(key + _flat(readers[client.type(key)](key)) for key in client.scan_iter(count=1000))
    client.close()
    return found


def redis_client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url.replace("valkey://", "redis://"), protocol=2)


def _damaged(kept: bytes) -> bytes:
    middle = len(kept) // 2
    return kept[:middle] + bytes([kept[middle] ^ 1]) + kept[middle + 1 :]


def _flat(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"".join(_flat(part) for pair in value.items() for part in pair)
    if isinstance(value, bytes | None):
        return value or b""
    return b"".join(map(_flat, value))


def in_memory() -> Place:
    return Place("memory", "memory://")


def sqlite(folder: Path) -> Place:
    return Place("sqlite", str(folder / "cache.db"))


def pgvector(server: Any) -> Place:
    return Place("pgvector", server.url, server)


def redis(server: Any) -> Place:
    return Place("redis", server.url, server)
