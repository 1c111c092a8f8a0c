"""Where a backend of the contract tests keeps its entries: how to open it, look into it, and damage it."""

from __future__ import annotations

import base64
import threading
import uuid
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import httpx
import qdrant_client
from qdrant_client.http.exceptions import UnexpectedResponse

from pipeline.cache.backend import Backend, Capacity
from pipeline.cache.backends import file_of, open_backend
from pipeline.cache.encryption import Codec
from pipeline.cache.qdrant import QdrantBackend
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
    client: Any = None  # in place of a server: it lives in this process only
    name: str = field(default_factory=lambda: f"cache-{next(_names)}")
    opened: list[Backend] = field(default_factory=list)
    in_memory: dict[str, Backend] = field(default_factory=dict)

    def open(self, capacity: Capacity | None = None, codec: Codec | None = None, name: str = "") -> Backend:
        name = name or self.name
        if self.url == "memory://":
            backend = self.in_memory.setdefault(name, open_backend(self.url, capacity))
        elif self.client is None:
            backend = open_backend(self.url, capacity, name=name, codec=codec)
        else:
            backend = QdrantBackend(self.url, capacity, name=name, codec=codec, client=self.client)
        self.opened.append(backend)
        return backend

    def raw(self) -> bytes:
        return self.storage.raw(self.url)

    def damage(self, key: bytes) -> None:
        self.storage.damage(self.url, self.name, key)

    @property
    def seals(self) -> bool:
        """Whether answers can be encrypted there."""
        return not self.url.startswith(("qdrant", "memory"))

    @property
    def is_shared(self) -> bool:
        """Whether other processes can use it."""
        return self.client is None and not self.url.startswith("memory")


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
        import sqlite3

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
        found = b"".join(key + _flat(readers[client.type(key)](key)) for key in client.scan_iter(count=1000))
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


class QdrantStorage:
    def __init__(self, client: Any) -> None:
        self._client = client

    def raw(self, url: str) -> bytes:
        raise NotImplementedError  # nothing is sealed there

    def damage(self, url: str, name: str, key: bytes) -> None:  # noqa: ARG002
        collection, id = f"{name}-answers", str(uuid.UUID(bytes=key))
        (point,) = self._client.retrieve(collection, [id], with_payload=["answer"])
        answer = base64.b64encode(damaged(base64.b64decode(point.payload["answer"]))).decode()
        self._client.set_payload(collection, {"answer": answer}, points=[id])


_STATUSES = {"not found": 404, "already exists": 409}  # of a server that says so


class InProcess:
    """The model of a Qdrant server that qdrant-client carries, with a server's errors and one call at a time."""

    def __init__(self) -> None:
        self._client = qdrant_client.QdrantClient(":memory:")
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                try:
                    return getattr(self._client, name)(*args, **kwargs)
                except ValueError as error:
                    status = next((code for text, code in _STATUSES.items() if text in str(error)), None)
                    if status is None:
                        raise
                    raise UnexpectedResponse(status, str(error), b"", httpx.Headers()) from error

        return call

    def create_payload_index(self, *_: object) -> None:
        """Which changes nothing here."""

    def close(self) -> None:
        """Others use it, too."""


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


def qdrant_in_process() -> Place:
    client = InProcess()
    return Place("qdrant://in-process", QdrantStorage(client), client=client)


def qdrant(server: Any) -> Place:
    return Place(server.url, QdrantStorage(qdrant_client.QdrantClient(port=server.port)), server)


def redis(server: Any) -> Place:
    return Place(server.url, RedisStorage(), server)
