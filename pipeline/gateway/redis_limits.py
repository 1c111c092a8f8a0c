"""The buckets of tenants in Redis or Valkey, so that gateways on several machines share the limits of a minute.

Whatever is taken is taken by one script, which runs alone in the server and by its clock: two gateways cannot both take
the last request, and need not agree about the time. Of each tenant there is one hash, `pipeline:limits:NAME`, which
expires when all of its buckets are full again.

While the server does not answer, each gateway goes on by itself, from the levels that it saw last: no request fails and
none waits for longer than the timeout here, but a tenant then has its limits once on each gateway. A circuit breaker
lets one request in a while find out whether the server is back.

What it does not share: how many requests of a tenant run at once, which each gateway counts by itself.

Written against Redis 6.2 and newer, with redis-py 5 to 8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.cache.backend import BackendDown
from pipeline.cache.circuit_breaker import CircuitBreaker, ServerUnreachable
from pipeline.cache.redis.server import RedisAddress
from pipeline.gateway.limits import BucketState, BucketTake

_log = logging.getLogger("pipeline.gateway")

# Seconds: to connect, and for an answer. A first token waits for it, so it is short.
_TIMEOUT_S = 0.25

# ARGV: 1 to take what there is not, too; then of each bucket its name, what it holds, and how much is wanted.
# Returns of each bucket its level, and the seconds until as much is there. Numbers are texts, or they would be cut.
_TAKE = """
local time = redis.call('TIME')
local now, forced = time[1] + time[2] / 1000000, ARGV[1] == '1'
local levels, waits, short = {}, {}, false
for at = 2, #ARGV, 3 do
  local what, most, amount = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local kept = redis.call('HMGET', KEYS[1], what, what .. ':at')
  local level = most
  if kept[1] then
    level = math.min(most, tonumber(kept[1]) + math.max(0, now - tonumber(kept[2])) * most / 60)
  end
  local wait = forced and 0 or math.max(0, (math.min(amount, most) - level) / most * 60)
  levels[at], waits[at], short = level, wait, short or wait > 0
end
local states, full_ms = {}, redis.call('PTTL', KEYS[1])
for at = 2, #ARGV, 3 do
  local what, most, amount = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local level = levels[at]
  if not short then level = forced and math.max(level - amount, -most) or level - amount end
  level = string.format('%.17g', level)
  redis.call('HSET', KEYS[1], what, level, what .. ':at', string.format('%.17g', now))
  full_ms = math.max(full_ms, math.ceil((most - level) / most * 60000) + 1000)
  states[#states + 1] = level
  states[#states + 1] = string.format('%.17g', waits[at])
end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', full_ms))
return states
"""


class RedisBuckets:
    """See `limits.SharedBuckets`. For one event loop; nothing is connected before the first request.

    Attributes:
        on_fallback: called whenever the server did not answer, and a gateway counts by itself.
    """

    def __init__(self, address: RedisAddress, *, timeout_s: float = _TIMEOUT_S) -> None:
        """
        Args:
            address: of the server; the password is that of the environment.
            timeout_s: to connect, and for an answer.
        """
        from redis import asyncio as aioredis
        from redis import exceptions
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.address = address
        self.on_fallback: Callable[[], None] = lambda: None
        self._exceptions = exceptions
        self._breaker = CircuitBreaker()
        self._fault = ""
        self._client: Any = aioredis.Redis(
            **address.options(),
            protocol=2,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            # A pooled connection may have been closed by the server since: that is tried again, a timeout is not.
            retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        )
        self._take: Any = self._client.register_script(_TAKE)

    async def take(
        self, tenant: str, wanted: Sequence[BucketTake], *, forced: bool = False
    ) -> Sequence[BucketState] | None:
        """See `limits.SharedBuckets.take`."""
        words = [word for one in wanted for word in (one.what, repr(one.per_minute), repr(one.amount))]
        try:
            with self._breaker.attempt():
                found = await self._ask(f"pipeline:limits:{tenant}", [str(int(forced)), *words])
        except BackendDown as error:
            if not self._fault:
                _log.warning("limits of tenants are counted by this gateway alone: %s", error)
            self._fault = str(error)
            self.on_fallback()
            return None
        if self._fault:
            self._fault = ""
            _log.warning("limits of tenants are shared again: %s", self.address)
        return [
            BucketState(float(level), float(wait_s))
            for level, wait_s in zip(found[::2], found[1::2], strict=True)
        ]

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _ask(self, key: str, words: Sequence[str]) -> Sequence[bytes]:
        errors = self._exceptions
        try:
            found: Sequence[bytes] = await self._take(keys=[key], args=words)
            return found
        except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
            raise ServerUnreachable(f"{self.address}: {error}") from error
        except errors.RedisError as error:
            raise BackendDown(f"{self.address}: {error}") from error
