"""Entries in Redis or Valkey. Each change is one script; each exact lookup is one `HGET`.

What is evicted is for this backend to say (the entry that was used longest ago, at the capacity of the recipe), not for
the server: give it `maxmemory-policy noeviction` or `volatile-*`, and a maxmemory above the capacity. An entry that the
server dropped by itself is a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

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
from pipeline.cache.codec import PackedEntry
from pipeline.cache.encryption import Codec
from pipeline.cache.packed_backend import PackedBackend
from pipeline.cache.redis import scripts
from pipeline.cache.redis.engine import QueryEngine
from pipeline.cache.redis.server import RedisAddress, RedisConnections, Script
from pipeline.cache.vector_index import Row, ScopeIndexes

_PAGE = 256  # entries that one command reads or removes


class RedisBackend(PackedBackend):
    """See `pipeline.cache.backend.Backend`.

    >>> cache = RedisBackend(Address.parse("redis://cache.internal"))     # doctest: +SKIP
    """

    remote = True

    def __init__(
        self,
        address: RedisAddress,
        capacity: Capacity | None = None,
        *,
        name: str = "pipeline",
        codec: Codec | None = None,
        server: RedisConnections | None = None,
    ) -> None:
        """
        Args:
            address: of the server.
            capacity: how much is kept at most.
            name: of this cache; several are kept apart in one database.
            codec: encrypts what is kept; embeddings are then indexed in the memory of this process.

        Raises:
            ValueError: the distribution `redis` is missing.
        """
        super().__init__(capacity, codec)
        self._server = server or RedisConnections(address)
        self._name = name
        self._prefix = f"pipeline:{{{name}}}:"  # braces: all keys lie in one slot of a cluster
        self._engine = QueryEngine(self._server, self._prefix)
        self._indexes = ScopeIndexes(self._codec, self._read_after)
        self._put = self._server.script(scripts.PUT)
        self._remove = self._server.script(scripts.REMOVE)
        self._purge = self._server.script(scripts.PURGE)
        self._turns = self._server.script(scripts.TURNS)

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """Find the entries of a scope with the nearest questions, the nearest first.

        The server's query engine finds them; without one, or if embeddings are encrypted, an index in memory.

        Args:
            scope: where to search.
            vector: float32 [dimensions] of length 1.
            count: how many are wanted at most.
            min_similarity: cosine; entries that are less near are left out. By default none is.

        Returns:
            Keys, questions and cosines; some of the entries may have expired since.
        """
        if self._indexed_there:
            near = self._engine.near(scope, vector, count, min_similarity)
            turns = self._server.together([("HGET", self._at(key), "turn") for key, _ in near])
            return self._codec.candidates(
                (key, turn, cosine)
                for (key, cosine), turn in zip(near, turns, strict=True)
                if turn is not None
            )
        return self._indexes.near(
            scope, vector, count, min_similarity, lambda ids: self._run(self._turns, *ids)
        )

    def remove(self, keys: Iterable[bytes]) -> int:
        """Remove entries by their keys, 256 at a time.

        Args:
            keys: of the entries; those that are not there are passed over.

        Returns:
            How many were there.
        """
        wanted = list(keys)
        pages = [wanted[at : at + _PAGE] for at in range(0, len(wanted), _PAGE)]
        return sum(int(self._run(self._remove, *page)) for page in pages)

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        """Remove the selected entries, 256 at a time.

        Args:
            which: selects them; by default all.

        Returns:
            How many there were.
        """
        before = "" if which.before is None else repr(which.before)
        ids = [id.hex() if id is not None else "" for id in (which.scope, which.engine, which.tenant)]
        gone, last = 0, b"-1"
        while last:
            last, count = self._run(self._purge, before, last, _PAGE, *ids)
            gone += int(count)
        return gone

    def items(self) -> Iterator[StoredEntry]:
        """Yield all entries that can be read, the newest first; 256 are fetched at a time."""
        below = b"+inf"
        while page := self._server.call(
            "ZREVRANGEBYSCORE", self._prefix + "order", below, "-inf", "WITHSCORES", "LIMIT", 0, _PAGE
        ):
            keys, below = page[::2], b"(" + page[-1]
            yield from self._kept(keys)

    def removals(self) -> int:
        """Return a number that changes whenever any process removes or replaces an entry."""
        return int(self._server.call("HGET", self._prefix + "totals", "removals") or 0)

    def usage(self) -> Usage:
        """Return how full the cache is: entries, bytes, those with embeddings, and the oldest."""
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
        """Describe kind, server, name, version, and where embeddings are searched, for people."""
        told = self._server.call("INFO", "server")
        kind = "valkey" if "valkey_version" in told else "redis"
        return {
            "kind": kind,
            "server": str(self._server.address),
            "name": self._name,
            "version": str(told.get(f"{kind}_version", "unknown")),
            "embeddings": "query engine" if self._indexed_there else "indexed in memory",
        }

    def close(self) -> None:
        """Write when entries were last used, if the server can be reached, and close the connections."""
        with suppress(BackendDown):  # what was used last is not worth more than leaving
            self._flush()
        self._server.close()

    def _answer(self, key: bytes) -> bytes | None:
        answer: bytes | None = self._server.call("HGET", self._at(key), "answer")
        return answer

    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        lives_ms = max(1, round(1000 * (packed.expires - packed.created)))
        self._flush()
        self._run(
            self._put,
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
        kept = self._server.together([("HGET", self._at(key), "embedding") for key in page[::2]])
        rows = zip(page[::2], page[1::2], kept, strict=True)
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
                continue  # expired, or gone since the page was read
            opened = self._codec.both(turn, answer, key)
            if opened is not None:
                _, embedded, *ids, _ = account.decode().split()
                scope, engine, tenant = map(bytes.fromhex, ids)
                yield StoredEntry(key, scope, engine, tenant, *opened, float(use), embedded == "1")

    def _flush(self) -> None:
        if touched := self._access_times.take():
            pairs = [part for key, now in touched.items() for part in (repr(now), key)]
            self._server.call("ZADD", self._prefix + "used", "XX", "GT", *pairs)

    def _run(self, script: Script, *args: object) -> Any:
        return script(self._prefix + "totals", (self._prefix, *args))

    def _at(self, key: bytes) -> bytes:
        return f"{self._prefix}entry:".encode() + key
