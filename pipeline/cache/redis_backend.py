"""Entries in Redis or Valkey; the nearest are found by its query engine.

Each change is one script; each exact lookup is one `HGET`.

What is evicted is for this backend to say (the entry that was used longest ago, at the capacity of the recipe), not for
the server: give it `maxmemory-policy noeviction` or `volatile-*`, and a maxmemory above the capacity. An entry that the
server dropped by itself is a miss.

Redis since 7.4 comes under RSALv2, SSPLv1 or (since 8.0) AGPLv3; Valkey and Redis up to 7.2 under BSD. The exact layer
works with all of them from 6.2 on.

Changes are commands of a Lua script, data/redis_backend.lua, which says how entries are laid out.
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
from pipeline.cache.packed_backend import PackedBackend, PackedEntry
from pipeline.cache.redis_server import CommandRefused, RedisAddress, RedisConnections
from pipeline.cache.vector_index import Row, ScopeIndexes

# Formats of embeddings; the first one that the server knows is used.
_FORMATS = {"FLOAT16": "<f2", "FLOAT32": "<f4"}
_LINKS, _BUILD_EFFORT, _SEARCH_EFFORT = 16, 128, 64


class QueryEngine:
    """The server's query engine, where it has one: an HNSW index of all embeddings, asked within one scope.

    Written against RediSearch 2.10 (Redis Stack 7.4, Redis 8) and the search module of Valkey. The server must read the
    embeddings for this, so that sealed ones are indexed in the memory of each process instead.
    """

    def __init__(self, server: RedisConnections, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._exists: bool | None = None
        # Dimensions -> format of the index that is there.
        self._made: dict[int, str] = {}

    def is_there(self) -> bool:
        """Whether the server has a query engine."""
        if self._exists is None:
            try:
                self._server.call("FT._LIST")
                self._exists = True
            except CommandRefused:
                self._exists = False
        return self._exists

    def field(self, vector: Vector) -> tuple[str, bytes]:
        """Return name and value of the hash field for an embedding, and make the index if need be."""
        kind = self._made.get(len(vector)) or self._make(len(vector))
        return f"{kind}:{len(vector)}", _packed(vector, kind)

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float
    ) -> list[tuple[bytes, float]]:
        """Find keys and cosines of the nearest entries of a scope that are near enough, the nearest first.

        It does not return the questions: RediSearch 2.10 cuts a field that it returns at its first zero byte.
        """
        try:
            reply = self._search(scope, vector, count)
        except CommandRefused:
            # Such as after a restart without data: the index is made again.
            self._made.pop(len(vector), None)
            reply = self._search(scope, vector, count)
        start = len(f"{self._prefix}entry:")
        near = [
            (name[start:], 1 - float(fields[1]))
            for name, fields in zip(reply[::2], reply[1::2], strict=True)
            if fields
        ]
        return sorted((pair for pair in near if pair[1] >= min_similarity), key=lambda pair: -pair[1])

    def _search(self, scope: bytes, vector: Vector, count: int) -> Sequence[Any]:
        size = len(vector)
        kind = self._made.get(size) or self._make(size)
        query = f"(@scope:{{{scope.hex()}}})=>[KNN {count} @embedding $vector AS distance]"
        reply: Sequence[Any] = self._server.call(
            "FT.SEARCH", self._index(size), query, "PARAMS", 2, "vector", _packed(vector, kind),
            "RETURN", 1, "distance", "LIMIT", 0, count, "DIALECT", 2,
        )  # fmt: skip
        # Without their number.
        return reply[1:]

    def _index(self, dimensions: int) -> str:
        return f"{self._prefix}near:{dimensions}"

    def _make(self, dimensions: int) -> str:
        refusals = []
        for kind in _FORMATS:
            try:
                self._create(dimensions, kind)
            except CommandRefused as error:
                if "already exists" not in str(error).lower():
                    refusals.append(str(error))
                    continue
                kind = self._format_of(dimensions)
            self._made[dimensions] = kind
            return kind
        raise BackendDown("; ".join(refusals))

    def _create(self, dimensions: int, kind: str) -> None:
        parameters: Sequence[object] = (
            "TYPE", kind, "DIM", dimensions, "DISTANCE_METRIC", "COSINE",
            "M", _LINKS, "EF_CONSTRUCTION", _BUILD_EFFORT, "EF_RUNTIME", _SEARCH_EFFORT,
        )  # fmt: skip
        self._server.call(
            "FT.CREATE", self._index(dimensions), "ON", "HASH", "PREFIX", 1, f"{self._prefix}entry:",
            "SCHEMA", "scope", "TAG",
            f"{kind}:{dimensions}", "AS", "embedding", "VECTOR", "HNSW", len(parameters), *parameters,
        )  # fmt: skip

    def _format_of(self, dimensions: int) -> str:
        """Return the format of an index that another process made."""
        information = repr(self._server.call("FT.INFO", self._index(dimensions)))
        return next(kind for kind in _FORMATS if f"{kind}:{dimensions}" in information)


def _packed(vector: Vector, kind: str) -> bytes:
    return np.asarray(vector, _FORMATS[kind]).tobytes()


# Entries that one command reads or removes.
_PAGE = 256

_COMMANDS = (files(__package__) / "data" / "redis_backend.lua").read_text(encoding="utf-8")


class RedisBackend(PackedBackend):
    """See `pipeline.cache.backend.Backend`.

    >>> cache = RedisBackend(RedisAddress.parse("redis://cache.internal"))     # doctest: +SKIP
    """

    remote = True

    def __init__(
        self,
        address: RedisAddress,
        capacity: Capacity | None = None,
        *,
        name: str = "pipeline",
        codec: Codec | None = None,
    ) -> None:
        """
        Args:
            name: several caches in one database are kept apart by it.
            codec: encrypts entries; embeddings are then indexed in the memory of this process.

        Raises:
            ValueError: the distribution `redis` is missing.
        """
        super().__init__(capacity, codec)
        self._server = RedisConnections(address)
        self._name = name
        # With braces, all keys lie in one slot of a cluster.
        self._prefix = f"pipeline:{{{name}}}:"
        self._engine = QueryEngine(self._server, self._prefix)
        self._indexes = ScopeIndexes(self._codec, self._read_after)
        self._commands = self._server.script(_COMMANDS)

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """See `Backend.near`. Without a query engine, or if embeddings are encrypted, an index in memory is asked."""
        if self._indexed_there:
            near = self._engine.near(scope, vector, count, min_similarity)
            turns = self._server.together([("HGET", self._at(key), "turn") for key, _ in near])
            return self._codec.candidates(
                (key, turn, cosine)
                for (key, cosine), turn in zip(near, turns, strict=True)
                if turn is not None
            )
        return self._indexes.near(scope, vector, count, min_similarity, lambda ids: self._run("turns", *ids))

    def remove(self, keys: Iterable[bytes]) -> int:
        wanted = list(keys)
        pages = [wanted[at : at + _PAGE] for at in range(0, len(wanted), _PAGE)]
        return sum(int(self._run("remove", *page)) for page in pages)

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        before = "" if which.before is None else repr(which.before)
        ids = [id.hex() if id is not None else "" for id in (which.scope, which.engine, which.tenant)]
        gone, last = 0, b"-1"
        while last:
            last, count = self._run("purge", before, last, _PAGE, *ids)
            gone += int(count)
        return gone

    def items(self) -> Iterator[StoredEntry]:
        below = b"+inf"
        while page := self._server.call(
            "ZREVRANGEBYSCORE", self._prefix + "order", below, "-inf", "WITHSCORES", "LIMIT", 0, _PAGE
        ):
            keys, below = page[::2], b"(" + page[-1]
            yield from self._kept(keys)

    def removals(self) -> int:
        return int(self._server.call("HGET", self._prefix + "totals", "removals") or 0)

    def usage(self) -> Usage:
        totals, entries, first = self._server.together(
            [
                ("HMGET", self._prefix + "totals", "bytes", "embedded"),
                ("ZCARD", self._prefix + "order"),
                ("ZRANGE", self._prefix + "order", 0, 0),
            ]
        )
        account = self._server.call("HGET", self._prefix + "known", first[0]) if first else None
        oldest = None if account is None else float(account.split()[-1])
        return Usage(entries, int(totals[0] or 0), int(totals[1] or 0), oldest)

    def describe(self) -> Mapping[str, str]:
        information = self._server.call("INFO", "server")
        kind = "valkey" if "valkey_version" in information else "redis"
        return {
            "kind": kind,
            "server": str(self._server.address),
            "name": self._name,
            "version": str(information.get(f"{kind}_version", "unknown")),
            "embeddings": "query engine" if self._indexed_there else "indexed in memory",
        }

    def close(self) -> None:
        """Write when entries were last used, if the server can be reached, and close the connections."""
        with suppress(BackendDown):
            self._flush()
        self._server.close()

    def _answer(self, key: bytes) -> bytes | None:
        answer: bytes | None = self._server.call("HGET", self._at(key), "answer")
        return answer

    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        lives_ms = max(1, round(1000 * (packed.expires - packed.created)))
        self._flush()
        self._run(
            "put",
            packed.key,
            repr(packed.created),
            repr(packed.expires),
            lives_ms,
            self._capacity.entries,
            self._capacity.bytes,
            packed.size,
            int(packed.vector is not None),
            packed.scope.hex(),
            packed.engine.hex(),
            packed.tenant.hex(),
            "turn",
            packed.turn,
            "answer",
            packed.answer,
            *self._embedding(packed, vector),
        )

    @property
    def _indexed_there(self) -> bool:
        return not self._codec.sealed and self._engine.is_there()

    def _embedding(self, packed: PackedEntry, vector: Vector | None) -> tuple[str | bytes, ...]:
        if vector is None or packed.vector is None:
            return ()
        if self._indexed_there:
            return ("scope", packed.scope.hex(), *self._engine.field(vector))
        return "embedding", packed.vector

    def _read_after(self, scope: bytes, after: int, limit: int) -> Sequence[Row]:
        page = self._server.call(
            "ZRANGEBYSCORE", f"{self._prefix}scope:{scope.hex()}", f"({after}", "+inf", "WITHSCORES",
            "LIMIT", 0, limit,
        )  # fmt: skip
        if not page:
            return []
        embeddings = self._server.together([("HGET", self._at(key), "embedding") for key in page[::2]])
        rows = zip(page[::2], page[1::2], embeddings, strict=True)
        return [(int(id), key, vector) for key, id, vector in rows]

    def _kept(self, keys: Sequence[bytes]) -> Iterator[StoredEntry]:
        fields = [("HMGET", self._at(key), "turn", "answer") for key in keys]
        *rows, used, known = self._server.together(
            [
                *fields,
                ("ZMSCORE", self._prefix + "used", *keys),
                ("HMGET", self._prefix + "known", *keys),
            ]
        )
        for key, (turn, answer), use, account in zip(keys, rows, used, known, strict=True):
            if not (turn and answer and use and account):
                # Expired, or gone since the page was read.
                continue
            opened = self._codec.both(turn, answer, key)
            if opened is not None:
                _, embedded, *ids, _ = account.decode().split()
                scope, engine, tenant = map(bytes.fromhex, ids)
                yield StoredEntry(key, scope, engine, tenant, *opened, float(use), embedded == "1")

    def _flush(self) -> None:
        if touched := self._access_times.take():
            pairs = [part for key, now in touched.items() for part in (repr(now), key)]
            self._server.call("ZADD", self._prefix + "used", "XX", "GT", *pairs)

    def _run(self, command: str, *args: object) -> Any:
        return self._commands(self._prefix + "totals", (self._prefix, command, *args))

    def _at(self, key: bytes) -> bytes:
        return f"{self._prefix}entry:".encode() + key
