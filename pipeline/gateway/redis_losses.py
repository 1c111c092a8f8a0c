"""Losses of servers by request, in a Redis or Valkey that several gateways share.

Losses are reported as they happen, and what is held is read once a second: a request that ended servers of one gateway
is refused by the others about a second later, long before a server is back. While the server does not answer, each
gateway counts by itself.

    pipeline:losses:DIGEST    hash: at how many losses the request was in flight, and when it was the last time
    pipeline:held             sorted set: what is not sent to a server, by the time until when
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pipeline.cache.backend import BackendDown
from pipeline.cache.redis_server import RedisAddress
from pipeline.gateway.blame import WINDOW_S
from pipeline.gateway.shared_redis import SharedRedis

_log = logging.getLogger("pipeline.gateway")

# Seconds to connect, and for an answer; no request waits for reports.
_TIMEOUT_S = 5.0
_POLL_S = 1.0
_MOST_HELD = 1000
_HELD = "pipeline:held"

# KEYS: of the request. ARGV: for how many seconds it had run, and until its losses are forgotten. What was sent before
# the last loss adds nothing: others were lost with the same server, or servers were lost together.
_COUNT = """
local time = redis.call('TIME')
local now, last = time[1] + time[2] / 1000000, redis.call('HGET', KEYS[1], 'at')
if not last or now - ARGV[1] > tonumber(last) then
  redis.call('HINCRBY', KEYS[1], 'losses', 1)
  redis.call('HSET', KEYS[1], 'at', string.format('%.6f', now))
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return redis.call('HGET', KEYS[1], 'losses')
"""
# KEYS: the sorted set. ARGV: member, seconds.
_HOLD = """
local time = redis.call('TIME')
return redis.call('ZADD', KEYS[1], 'GT', time[1] + ARGV[2], ARGV[1])
"""
# KEYS: the sorted set. ARGV: most members. Returns members and seconds.
_READ = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local found = redis.call('ZREVRANGE', KEYS[1], 0, ARGV[1] - 1, 'WITHSCORES')
for at = 2, #found, 2 do found[at] = string.format('%.3f', found[at] - now) end
return found
"""


class RedisLosses:
    """Losses of servers by request, counted together with other gateways. For one event loop; no report waits."""

    def __init__(self, address: RedisAddress) -> None:
        self._redis = SharedRedis(address, timeout_s=_TIMEOUT_S)
        self._count, self._hold = self._redis.script(_COUNT), self._redis.script(_HOLD)
        self._read = self._redis.script(_READ)
        self._tasks: set[asyncio.Task[None]] = set()
        self._hear: list[Callable[[Mapping[str, float]], None]] = []
        self._reading: asyncio.Task[None] | None = None

    def listen(self, hear: Callable[[Mapping[str, float]], None]) -> None:
        """Call `hear` about once a second with what is held -> for how many seconds."""
        self._hear.append(hear)
        if self._reading is None:
            self._reading = asyncio.create_task(self._keep_reading())

    def report_loss(self, digest: str, ran_s: float, counted: Callable[[int], None]) -> None:
        """Count a loss that a request was in flight at.

        Args:
            digest: digest of the request; see `lost_servers.work_digest`.
            ran_s: seconds for which it had been in flight.
            counted: called with the number of losses that all gateways together know of.
        """
        noted = time.monotonic()

        async def count() -> None:
            # Until it is sent, time goes on: the server works out when the request began.
            words = [repr(ran_s + time.monotonic() - noted), int(WINDOW_S)]
            counted(int(await self._count([f"pipeline:losses:{digest}"], words)))

        self._start(count())

    def report_pass(self, digest: str) -> None:
        """Forget the losses of a request: it was answered."""
        redis = self._redis
        self._start(redis.run(lambda: redis.client.delete(f"pipeline:losses:{digest}")))

    def hold(self, name: str, wait_s: float) -> None:
        """Have all gateways send nothing of a digest, or of a tenant (`blame.tenant_hold`), to a server for a time."""
        self._start(self._hold([_HELD], [name, repr(wait_s)]))

    async def aclose(self) -> None:
        """Wait for the reports that are under way, and close all connections."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.gather(*self._tasks)
        await self._redis.aclose()

    def _start(self, reporting: Awaitable[Any]) -> None:
        async def report() -> None:
            try:
                await reporting
            except BackendDown as error:
                _log.warning("losses of servers are counted by this gateway alone: %s", error)

        task = asyncio.create_task(report())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_reading(self) -> None:
        while True:
            # What was read last holds until its time is over.
            with contextlib.suppress(BackendDown):
                found = await self._read([_HELD], [_MOST_HELD])
                held = {
                    name.decode(): float(wait_s) for name, wait_s in zip(found[::2], found[1::2], strict=True)
                }
                for hear in self._hear:
                    hear(held)
            await asyncio.sleep(_POLL_S)
