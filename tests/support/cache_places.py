"""Where a backend of the contract tests keeps its entries: how to open it, look into it, and damage it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from pipeline.cache.backend import Backend, Capacity
from pipeline.cache.backends import file_of, open_backend
from pipeline.cache.encryption import Codec
from tests.support.servers import Server

_names = count()


class Storage(Protocol):
    """What lies behind an address."""

    def raw(self, url: str) -> bytes:
        """Everything that is stored there."""

    def damage(self, url: str, name: str, key: bytes) -> None:
        """Change a byte of an answer."""


@dataclass
class Place:
    """One cache, that no other test uses."""

    url: str
    storage: Storage
    server: Server | None = None
    name: str = field(default_factory=lambda: f"cache-{next(_names)}")
    opened: list[Backend] = field(default_factory=list)
    in_memory: dict[str, Backend] = field(default_factory=dict)

    def open(self, capacity: Capacity | None = None, codec: Codec | None = None, name: str = "") -> Backend:
        name = name or self.name
        if self.url == "memory://":
            backend = self.in_memory.setdefault(name, open_backend(self.url, capacity))
        else:
            backend = open_backend(self.url, capacity, name=name, codec=codec)
        self.opened.append(backend)
        return backend

    def raw(self) -> bytes:
        return self.storage.raw(self.url)

    def damage(self, key: bytes) -> None:
        self.storage.damage(self.url, self.name, key)

    def is_whole(self) -> bool:
        """Whether a file is one that SQLite can read to its end; servers look after their own."""
        if not self.url.endswith(".db"):
            return True
        with closing(sqlite3.connect(file_of(self.url))) as connection:
            return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))

    @property
    def is_shared(self) -> bool:
        """Whether other processes can use it."""
        return not self.url.startswith("memory")


def damaged(kept: bytes) -> bytes:
    middle = len(kept) // 2
    return kept[:middle] + bytes([kept[middle] ^ 1]) + kept[middle + 1 :]


class NoStorage:
    def raw(self, url: str) -> bytes:
        raise NotImplementedError

    def damage(self, url: str, name: str, key: bytes) -> None:
        raise NotImplementedError


class SqliteStorage:
    def raw(self, url: str) -> bytes:
        file = file_of(url)
        return b"".join(path.read_bytes() for path in sorted(file.parent.glob(file.name + "*")))

    def damage(self, url: str, name: str, key: bytes) -> None:  # noqa: ARG002
        with sqlite3.connect(file_of(url)) as connection:
            (kept,) = connection.execute("SELECT answer FROM entries WHERE key = ?", (key,)).fetchone()
            connection.execute("UPDATE entries SET answer = ? WHERE key = ?", (damaged(kept), key))
        connection.close()


class RedisStorage:
    def raw(self, url: str) -> bytes:
        client = self._client(url)
        readers = {
            b"hash": client.hgetall,
            b"zset": lambda key: client.zrange(key, 0, -1),
            b"string": client.get,
            b"set": client.smembers,
        }
        kinds = ((key, client.type(key)) for key in client.scan_iter(count=1000))
        # Keys of other tests may run out meanwhile.
        found = b"".join(key + _flat(readers[kind](key)) for key, kind in kinds if kind != b"none")
        client.close()
        return found

    def damage(self, url: str, name: str, key: bytes) -> None:
        client = self._client(url)
        at = f"pipeline:{{{name}}}:entry:".encode() + key
        client.hset(at, "answer", damaged(client.hget(at, "answer")))
        client.close()

    @staticmethod
    def _client(url: str) -> Any:
        import redis

        return redis.Redis.from_url(url.replace("valkey://", "redis://"), protocol=2)


class PgvectorStorage:
    def raw(self, url: str) -> bytes:
        import psycopg

        with psycopg.connect(url) as connection:
            rows = connection.execute("SELECT * FROM pipeline_cache_1.entries").fetchall()
        return b"".join(
            value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row
        )

    def damage(self, url: str, name: str, key: bytes) -> None:
        import psycopg

        with psycopg.connect(url) as connection:
            where = "FROM pipeline_cache_1.entries WHERE cache = %s AND key = %s"
            (kept,) = connection.execute(f"SELECT answer {where}", (name, key)).fetchone() or (b"",)
            connection.execute(
                "UPDATE pipeline_cache_1.entries SET answer = %s WHERE cache = %s AND key = %s",
                (damaged(kept), name, key),
            )


def _flat(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"".join(_flat(part) for pair in value.items() for part in pair)
    if isinstance(value, bytes | None):
        return value or b""
    return b"".join(map(_flat, value))


def in_memory() -> Place:
    return Place("memory://", NoStorage())


def sqlite(folder: Path) -> Place:
    return Place(str(folder / "cache.db"), SqliteStorage())


def pgvector(server: Any) -> Place:
    return Place(server.url, PgvectorStorage(), server)


def redis(server: Any) -> Place:
    return Place(server.url, RedisStorage(), server)
