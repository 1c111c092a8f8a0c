"""What tenants use in Redis or Valkey, so that gateways on several machines share their limits.

Whatever is taken is taken by one script, which runs alone in the server and by its clock: two gateways cannot both take
the last request, and need not agree about the time. Of each tenant there is one hash, `pipeline:limits:NAME`, which
expires when all of its buckets are full again.

While the server does not answer, each gateway goes on by itself, from the levels that it saw last: no request fails and
none waits for longer than the timeout of `shared_redis`, but a tenant then has its limits once on each gateway.

The choices of a tenant that run at once are a sorted set, `pipeline:running:NAME`: each has a lease, which its gateway
renews while it runs. What a gateway leaves behind that is killed, or that does not reach the server, ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.cache.backend import BackendDown
from pipeline.cache.redis.server import RedisAddress
from pipeline.gateway.limits import BucketState, BucketTake, Lease
from pipeline.gateway.shared_redis import TIMEOUT_S, SharedRedis

_log = logging.getLogger("pipeline.gateway")

# Seconds: how long a lease goes on without its gateway.
_LEASE_S = 30.0

# ARGV: 1 to take what there is not, too; name of a lease, or nothing, its choices, how many may run, and its seconds;
# then of each bucket its name, what it holds, and how much is wanted.
# Returns of each bucket its level, and the seconds until as much is there; then with a lease how many run, and 1 if
# they are too many. Numbers are texts, or they would be cut.
_TAKE = """
local time = redis.call('TIME')
local now, forced = time[1] + time[2] / 1000000, ARGV[1] == '1'
local lease, choices, running = ARGV[2], tonumber(ARGV[3]), 0
local levels, waits, short = {}, {}, false
if lease ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  running = redis.call('ZCARD', KEYS[2])
  short = running + choices > tonumber(ARGV[4])
end
local crowded = short
for at = 6, #ARGV, 3 do
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
for at = 6, #ARGV, 3 do
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
if lease ~= '' then
  for number = 1, short and 0 or choices do
    redis.call('ZADD', KEYS[2], now + ARGV[5], lease .. ':' .. number)
  end
  redis.call('PEXPIRE', KEYS[2], ARGV[5] * 1000)
  states[#states + 1] = tostring(running)
  states[#states + 1] = crowded and '1' or '0'
end
return states
"""
# ARGV: seconds, then names of choices that still run.
_RENEW = """
local time = redis.call('TIME')
for at = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', time[1] + time[2] / 1000000 + ARGV[1], ARGV[at])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1] * 1000)
"""


class RedisBuckets:
    """See `limits.SharedBuckets`. For one event loop; nothing is connected before the first request.

    Attributes:
        on_fallback: called whenever the server did not answer, and a gateway counts by itself.
    """

    def __init__(
        self, address: RedisAddress, *, timeout_s: float = TIMEOUT_S, lease_s: float = _LEASE_S
    ) -> None:
        """
        Args:
            address: of the server; the password is that of the environment.
            timeout_s: to connect, and for an answer.
            lease_s: how long choices count as running without being renewed.
        """
        self.address = address
        self.on_fallback: Callable[[], None] = lambda: None
        self._fault = ""
        self._redis = SharedRedis(address, timeout_s=timeout_s)
        self._take, self._renew = self._redis.script(_TAKE), self._redis.script(_RENEW)
        self._lease_s = lease_s
        self._held: dict[str, set[Lease]] = {}  # by tenant
        self._renewing: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(
        self,
        tenant: str,
        wanted: Sequence[BucketTake],
        *,
        forced: bool = False,
        lease: Lease | None = None,
    ) -> Sequence[BucketState] | None:
        """See `limits.SharedBuckets.take`."""
        words: list[Any] = [
            word for one in wanted for word in (one.what, repr(one.per_minute), repr(one.amount))
        ]
        held = ("", 0, 0) if lease is None else lease
        if lease is not None:
            # Before it is asked for: whoever is cancelled meanwhile may have it.
            self._held.setdefault(tenant, set()).add(lease)
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._keep_leases())
        keys = [f"pipeline:limits:{tenant}", f"pipeline:running:{tenant}"]
        try:
            words = [int(forced), *held, repr(self._lease_s), *words]
            found = await self._redis.run(self._take, keys, words)
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

    def release(self, tenant: str, lease: Lease) -> None:
        """See `limits.SharedBuckets.release`."""
        self._held[tenant].discard(lease)
        if self._closed:
            return  # a connection that nobody would close; the lease ends by itself
        task = asyncio.create_task(self._end_lease(tenant, lease))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def aclose(self) -> None:
        """Wait until what ended is given back, and close all connections."""
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await asyncio.gather(*self._releasing)
        await self._redis.aclose()

    async def _end_lease(self, tenant: str, lease: Lease) -> None:
        async def remove(keys: Sequence[str], args: Sequence[Any]) -> Any:
            return await self._redis.client.zrem(keys[0], *args)

        # Else it ends by itself.
        with contextlib.suppress(BackendDown):
            await self._redis.run(remove, [f"pipeline:running:{tenant}"], _names(lease))

    async def _keep_leases(self) -> None:
        """Renew what runs, as long as anything does."""
        while any(self._held.values()):
            await asyncio.sleep(self._lease_s / 3)
            for tenant, leases in [*self._held.items()]:
                if names := [name for lease in leases for name in _names(lease)]:
                    with contextlib.suppress(BackendDown):
                        key = f"pipeline:running:{tenant}"
                        await self._redis.run(self._renew, [key], [repr(self._lease_s), *names])


def _names(lease: Lease) -> list[str]:
    """Members of the sorted set, one for each choice."""
    return [f"{lease.name}:{number}" for number in range(1, lease.choices + 1)]
