"""Stored responses in Redis or Valkey, which several gateways share.

    pipeline:responses:TENANT:used       sorted set: id by the time of its last use (s since the epoch)
    pipeline:responses:TENANT:sizes      hash: id -> bytes of JSON; under "", of all together
    pipeline:responses:TENANT:one:ID     hash: response and input (sealed), previous, size

Each change is one script, which runs alone in the server: two gateways cannot both pass a bound. All keys expire after
the age at which an unused response is forgotten. A response exists while it is in `used`: where a server that is full
evicts keys, a response is forgotten, and the bounds still hold.

Written against Redis 6.2 and newer, with redis-py 5 to 8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from pipeline.cache.encryption import Codec
from pipeline.cache.redis_server import RedisAddress, RedisConnections
from pipeline.gateway.api.responses.stored import (
    StoredConversation,
    StoredResponse,
    StoredResponseLimits,
    conversation_of,
    seal_response,
    unseal_responses,
)
from pipeline.gateway.database import ServerFaults

# ARGV[1]: responses that were used last before this time (s) are forgotten.
_HEAD = """
local P, oldest = KEYS[1], tonumber(ARGV[1])
local used, sizes = P .. ':used', P .. ':sizes'
local function forget(id)
  local size = redis.call('HGET', sizes, id)
  redis.call('DEL', P .. ':one:' .. id)
  redis.call('ZREM', used, id)
  if not size then return 0 end
  redis.call('HDEL', sizes, id)
  redis.call('HINCRBY', sizes, '', 0 - size)
  return 1
end
local function is_stored(id)
  local at = redis.call('ZSCORE', used, id)
  return at and tonumber(at) >= oldest and redis.call('EXISTS', P .. ':one:' .. id) == 1
end
"""
# Then: now (s), age (ms), id, previous or "", response, input, size, most responses, most bytes.
_PUT = (
    _HEAD
    + """
local now, age, id, size = ARGV[2], ARGV[3], ARGV[4], ARGV[8]
if redis.call('EXISTS', used) ~= redis.call('EXISTS', sizes) then redis.call('DEL', used, sizes) end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', '(' .. ARGV[1])) do forget(old) end
forget(id)
local response = P .. ':one:' .. id
redis.call('HSET', response, 'previous', ARGV[5], 'response', ARGV[6], 'input', ARGV[7], 'size', size)
redis.call('ZADD', used, now, id)
redis.call('HSET', sizes, id, size)
redis.call('HINCRBY', sizes, '', size)
while redis.call('ZCARD', used) > tonumber(ARGV[9])
  or tonumber(redis.call('HGET', sizes, '')) > tonumber(ARGV[10]) do
  local unused = redis.call('ZRANGE', used, 0, 1)
  if not unused[2] then break end
  forget(unused[1] ~= id and unused[1] or unused[2])
end
for _, key in ipairs({response, used, sizes}) do redis.call('PEXPIRE', key, age) end
return 1
"""
)
# Then: ids. Returns for each response, input and previous; false if it is not stored.
_FIND = (
    _HEAD
    + """
local found = {}
for at = 2, #ARGV do
  found[at - 1] = is_stored(ARGV[at])
    and redis.call('HMGET', P .. ':one:' .. ARGV[at], 'response', 'input', 'previous')
end
return found
"""
)
# Then: id.
_DELETE = (
    _HEAD
    + """
return is_stored(ARGV[2]) and forget(ARGV[2]) or 0
"""
)
# Then: now (s), age (ms), id. Returns id and size of each response of a conversation, the newest first; nothing if one
# is not stored.
_CHAIN = (
    _HEAD
    + """
local chain, id = {}, ARGV[4]
while id ~= '' do
  if not is_stored(id) then return {} end
  local response = redis.call('HMGET', P .. ':one:' .. id, 'previous', 'size')
  chain[#chain + 1], chain[#chain + 2] = id, response[2]
  id = response[1]
end
for at = 1, #chain, 2 do
  redis.call('ZADD', used, ARGV[2], chain[at])
  redis.call('PEXPIRE', P .. ':one:' .. chain[at], ARGV[3])
end
redis.call('PEXPIRE', used, ARGV[3])
redis.call('PEXPIRE', sizes, ARGV[3])
return chain
"""
)


class RedisStoredResponses:
    """See `stored.StoredResponses`."""

    enabled = True

    def __init__(
        self,
        address: RedisAddress,
        codec: Codec,
        limits: StoredResponseLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Connects at the first use, with the password of the environment.

        Raises:
            ValueError: the distribution `redis` is missing.
        """
        self._codec, self._limits, self._clock = codec, limits, clock
        self._server = RedisConnections(address)
        self._put, self._find, self._delete, self._chain = map(
            self._server.script, (_PUT, _FIND, _DELETE, _CHAIN)
        )
        self._faults = ServerFaults(f"stored responses at {address}")

    def put(self, tenant: str, id: str, response: StoredResponse) -> bool:
        limits = self._limits
        if response.size > limits.bytes:
            return False
        sealed = seal_response(self._codec, tenant, id, response)
        with self._faults.attempt():
            self._put(
                _key(tenant),
                [
                    *(self._oldest(), repr(self._clock()), self._age_ms, id, response.previous or ""),
                    *(*sealed, response.size, limits.count, limits.bytes),
                ],
            )
        return True

    def find(self, tenant: str, ids: Collection[str]) -> Mapping[str, StoredResponse]:
        if not ids:
            return {}
        with self._faults.attempt():
            stored = self._find(_key(tenant), [self._oldest(), *ids])
        rows = [
            (id, response, given, previous.decode() or None)
            for id, (response, given, previous) in (
                pair for pair in zip(ids, stored, strict=True) if pair[1] is not None
            )
        ]
        return dict(unseal_responses(self._codec, tenant, rows))

    def delete(self, tenant: str, id: str) -> bool:
        with self._faults.attempt():
            return bool(self._delete(_key(tenant), [self._oldest(), id]))

    def conversation(
        self, tenant: str, id: str, *, most_items: int, most_bytes: int
    ) -> StoredConversation | None:
        with self._faults.attempt():
            chained = self._chain(_key(tenant), [self._oldest(), repr(self._clock()), self._age_ms, id])
        chain = [(id.decode(), int(size)) for id, size in zip(chained[::2], chained[1::2], strict=True)]
        if not chain:
            return None
        return conversation_of(chain, lambda wanted: self.find(tenant, wanted), most_items, most_bytes)

    def forget_old(self) -> None:
        """The server does."""

    def close(self) -> None:
        self._server.close()

    @property
    def _age_ms(self) -> int:
        return max(1, round(self._limits.age_s * 1000))

    def _oldest(self) -> str:
        return repr(self._clock() - self._limits.age_s)


def _key(tenant: str) -> str:
    return f"pipeline:responses:{tenant}"
