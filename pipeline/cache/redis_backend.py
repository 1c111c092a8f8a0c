"""Entries in Redis or Valkey. Each change is one script; each exact lookup is one `HGET`.

What is evicted is for this backend to say (the entry that was used longest ago, at the capacity of the recipe), not for
the server: give it `maxmemory-policy noeviction` or `volatile-*`, and a maxmemory above the capacity. An entry that the
server dropped by itself is a miss.

Redis since 7.4 comes under RSALv2, SSPLv1 or (since 8.0) AGPLv3; Valkey and Redis up to 7.2 under BSD. The exact layer
works with all of them from 6.2 on.

Changes are Lua scripts, which happen whole or not at all, whoever dies meanwhile. All names begin with a prefix, which
the scripts get as their first argument:

    entry:KEY     hash     turn, answer, the embedding, and for the query engine the scope (hex); expires by itself, as
                           a safety net
    known         hash     KEY -> "bytes embedded scope engine tenant created" (ids in hex): the account of an entry,
                           which stays when it has expired until the next put
    used          sorted   KEY by the time of its last use: what is evicted
    expires       sorted   KEY by the time at which it expires
    order         sorted   KEY by id: a number that rises with every put, also after the server lost everything
    scope:SCOPE   sorted   KEY by id, of the entries of one scope that have an embedding
    totals        hash     bytes, embedded, removals, id
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
from pipeline.cache.encryption import Codec
from pipeline.cache.packed_backend import PackedBackend, PackedEntry
from pipeline.cache.redis_query_engine import QueryEngine
from pipeline.cache.redis_server import RedisAddress, RedisConnections, Script
from pipeline.cache.vector_index import Row, ScopeIndexes

# Entries that one command reads or removes.
_PAGE = 256

_DROP = """
local P = ARGV[1]
local totals = P .. 'totals'
local function drop(key)
  local known = redis.call('HGET', P .. 'known', key)
  if not known then return 0 end
  local bytes, embedded, scope = string.match(known, '^(%d+) (%d) (%x+)')
  redis.call('DEL', P .. 'entry:' .. key)
  redis.call('HDEL', P .. 'known', key)
  redis.call('ZREM', P .. 'used', key)
  redis.call('ZREM', P .. 'expires', key)
  redis.call('ZREM', P .. 'order', key)
  redis.call('ZREM', P .. 'scope:' .. scope, key)
  redis.call('HINCRBY', totals, 'bytes', 0 - bytes)
  redis.call('HINCRBY', totals, 'embedded', 0 - embedded)
  redis.call('HINCRBY', totals, 'removals', 1)
  return 1
end
"""

# prefix, key, created, expires, ms to live, most entries, most bytes, bytes, embedded (0, 1), scope, engine, tenant,
# and the fields of the entry: name, value, …
_PUT = (
    _DROP
    + """
local key, created, expires, lives, embedded, scope = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[9], ARGV[10]
local most, most_bytes, bytes = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('HSETNX', totals, 'removals', string.format('%.0f', now))
drop(key)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', P .. 'expires', '-inf', created, 'LIMIT', 0, 16)) do drop(old) end
for _ = 1, 256 do
  local have = tonumber(redis.call('HGET', totals, 'bytes') or 0)
  if redis.call('ZCARD', P .. 'used') < most and have + bytes <= most_bytes then break end
  local oldest = redis.call('ZRANGE', P .. 'used', 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
local id = string.format('%.0f', math.max(now, tonumber(redis.call('HGET', totals, 'id') or 0) + 1))
redis.call('HSET', totals, 'id', id)
local entry = P .. 'entry:' .. key
redis.call('HSET', entry, unpack(ARGV, 13))
redis.call('PEXPIRE', entry, lives)
redis.call('HSET', P .. 'known', key, table.concat({ARGV[8], embedded, scope, ARGV[11], ARGV[12], created}, ' '))
redis.call('ZADD', P .. 'used', created, key)
redis.call('ZADD', P .. 'expires', expires, key)
redis.call('ZADD', P .. 'order', id, key)
if embedded == '1' then redis.call('ZADD', P .. 'scope:' .. scope, id, key) end
redis.call('HINCRBY', totals, 'bytes', bytes)
redis.call('HINCRBY', totals, 'embedded', embedded)
return 1
"""
)

# prefix, key, …
_REMOVE = (
    _DROP
    + """
local gone = 0
for at = 2, #ARGV do gone = gone + drop(ARGV[at]) end
return gone
"""
)

# prefix, created before or "", after this id, at most so many, scope or "", engine or "", tenant or ""; the last id,
# "" at the end, and how many
_PURGE = (
    _DROP
    + """
local before = tonumber(ARGV[2])
local page = redis.call('ZRANGEBYSCORE', P .. 'order', '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
local gone, last = 0, ''
for at = 1, #page, 2 do
  local key = page[at]
  last = page[at + 1]
  local known = redis.call('HGET', P .. 'known', key)
  local of = {string.match(known, '^%d+ %d (%x+) (%x+) (%x+) (.+)$')}
  local chosen = not before or tonumber(of[4]) < before
  for id = 1, 3 do chosen = chosen and (ARGV[4 + id] == '' or ARGV[4 + id] == of[id]) end
  if chosen then gone = gone + drop(key) end
end
return {last, gone}
"""
)

# prefix, id, …; for each id its key and turn, or false
_TURNS = """
local P, found = ARGV[1], {}
for at = 2, #ARGV do
  local key = redis.call('ZRANGEBYSCORE', P .. 'order', ARGV[at], ARGV[at])[1]
  local turn = key and redis.call('HGET', P .. 'entry:' .. key, 'turn')
  found[at - 1] = turn and {key, turn} or false
end
return found
"""


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
        self._put = self._server.script(_PUT)
        self._remove = self._server.script(_REMOVE)
        self._purge = self._server.script(_PURGE)
        self._turns = self._server.script(_TURNS)

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
        return self._indexes.near(
            scope, vector, count, min_similarity, lambda ids: self._run(self._turns, *ids)
        )

    def remove(self, keys: Iterable[bytes]) -> int:
        wanted = list(keys)
        pages = [wanted[at : at + _PAGE] for at in range(0, len(wanted), _PAGE)]
        return sum(int(self._run(self._remove, *page)) for page in pages)

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        before = "" if which.before is None else repr(which.before)
        ids = [id.hex() if id is not None else "" for id in (which.scope, which.engine, which.tenant)]
        gone, last = 0, b"-1"
        while last:
            last, count = self._run(self._purge, before, last, _PAGE, *ids)
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

    def _run(self, script: Script, *args: object) -> Any:
        return script(self._prefix + "totals", (self._prefix, *args))

    def _at(self, key: bytes) -> bytes:
        return f"{self._prefix}entry:".encode() + key
