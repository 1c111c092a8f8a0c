"""Losses of servers by request, in a Redis or Valkey that several gateways share.

Losses are reported as they happen, and what is held is read once a second: a request that ended servers of one gateway
is refused by the others about a second later, long before a server is back. While the server does not answer, each
gateway counts by itself. What it does there is commands of data/server_losses.lua, on these:

    pipeline:losses:DIGEST    hash: at how many losses the request was in flight, and when it was the last time
    pipeline:held             sorted set: what is not sent to a server, by the time until when
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
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

_COMMANDS = (files("pipeline.gateway") / "data" / "server_losses.lua").read_text(encoding="utf-8")


class RedisLosses:
    """Losses of servers by request, counted together with other gateways. For one event loop; no report waits."""

    def __init__(self, address: RedisAddress) -> None:
        self._redis = SharedRedis(address, timeout_s=_TIMEOUT_S)
        self._commands = self._redis.script(_COMMANDS)
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
            arguments = ["count", repr(ran_s + time.monotonic() - noted), int(WINDOW_S)]
            counted(int(await self._commands([f"pipeline:losses:{digest}"], arguments)))

        self._start(count())

    def report_pass(self, digest: str) -> None:
        """Forget the losses of a request: it was answered."""
        redis = self._redis
        self._start(redis.run(lambda: redis.client.delete(f"pipeline:losses:{digest}")))

    def hold(self, name: str, wait_s: float) -> None:
        """Have all gateways send nothing of a digest, or of a tenant (`blame.tenant_hold`), to a server for a time."""
        self._start(self._commands([_HELD], ["hold", name, repr(wait_s)]))

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
                reply = await self._commands([_HELD], ["read", _MOST_HELD])
                waits = {
                    name.decode(): float(wait_s) for name, wait_s in zip(reply[::2], reply[1::2], strict=True)
                }
                for hear in self._hear:
                    hear(waits)
            await asyncio.sleep(_POLL_S)
