"""Redis or Valkey that several gateways share, and the limits of tenants in it.

While the server does not answer, each gateway goes on by itself: nothing here waits for longer than a timeout, and a
circuit breaker lets one request in a while find out whether the server is back.

A tenant's take is one script (data/tenant_limits.lua), which runs alone in the server and by its clock: two gateways
cannot both take the last request, and need not agree about the time. Choices that run have leases, which their gateway
renews: those of a gateway that is killed, or does not reach the server, end by themselves. While the server is away
each gateway counts from the levels that it saw last, so a tenant then has its limits once on each gateway.

Written against Redis 6.2 and newer, with redis-py 5 to 8.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from pipeline.cache.backend import BackendDown
from pipeline.cache.circuit_breaker import CircuitBreaker, ServerUnreachable
from pipeline.cache.redis_server import RedisAddress

_log = logging.getLogger("pipeline.gateway")

# Seconds to connect, and for an answer: short enough for a first token to wait for.
_TIMEOUT_S = 0.25
_LEASE_S = 30.0  # how long a lease goes on without its gateway

_DATA = files("pipeline.gateway") / "data"
_TAKE = (_DATA / "tenant_limits.lua").read_text(encoding="utf-8")
_RENEW = (_DATA / "renew_leases.lua").read_text(encoding="utf-8")


class SharedRedis:
    """One server, for one event loop; nothing is connected before the first request."""

    def __init__(self, address: RedisAddress, *, timeout_s: float = _TIMEOUT_S) -> None:
        """
        Args:
            address: the password is that of the environment.
            timeout_s: seconds to connect, and for an answer.
        """
        from redis import asyncio as aioredis
        from redis import exceptions
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.address = address
        self._exceptions = exceptions
        self._breaker = CircuitBreaker()
        self.client: Any = aioredis.Redis(
            **address.options(),
            protocol=2,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            # A pooled connection may have been closed by the server since: that is tried again, a timeout is not.
            retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        )

    def script(self, text: str) -> Callable[[Sequence[str], Sequence[Any]], Awaitable[Any]]:
        """Return a Lua script as a function of keys and arguments, which raises `BackendDown` as `run` does."""
        registered = self.client.register_script(text)
        return lambda keys, arguments: self.run(lambda: registered(keys=keys, args=arguments))

    async def run(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command of the client, and return its result.

        Raises:
            BackendDown: the server does not answer in time, or fails.
        """
        errors = self._exceptions
        with self._breaker.attempt():
            try:
                return await command()
            except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
                raise ServerUnreachable(f"{self.address}: {error}") from error
            except errors.RedisError as error:
                raise BackendDown(f"{self.address}: {error}") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()


class BucketTake(NamedTuple):
    """Amount that is to be taken from one bucket of a tenant.

    Attributes:
        bucket: Name of the bucket.
    """

    bucket: str
    per_minute: float
    amount: float


class BucketState(NamedTuple):
    """A bucket after something was taken from it, or was not.

    Attributes:
        wait_s: seconds until as much is there as was wanted; 0 if it was.
    """

    level: float
    wait_s: float


class Lease(NamedTuple):
    """Choices of one request that are to run, of as many as a tenant may have at once on all gateways together."""

    name: str
    choices: int
    most: int


class RedisBuckets:
    """Buckets and leases of tenants. For one event loop; nothing is connected before the first request.

    Attributes:
        on_fallback: called whenever the server did not answer, and a gateway counts by itself.
    """

    def __init__(
        self, address: RedisAddress, *, timeout_s: float = _TIMEOUT_S, lease_s: float = _LEASE_S
    ) -> None:
        """`lease_s`: seconds that choices count as running without being renewed; see `SharedRedis` for the others."""
        self.address = address
        self.on_fallback: Callable[[], None] = lambda: None
        self._fault = ""
        self._redis = SharedRedis(address, timeout_s=timeout_s)
        self._take, self._renew = self._redis.script(_TAKE), self._redis.script(_RENEW)
        self._lease_s = lease_s
        self._leases: dict[str, set[Lease]] = {}  # by tenant
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
        """Take from all buckets, or from none if one has too little.

        Args:
            wanted: amounts; none of them more than once for the same bucket.
            forced: take what there is not, too, down to a minute's worth of debt.
            lease: choices that run until `release`, or this gateway is gone; None: none.

        Returns:
            The state of each bucket, and after them that of the choices that run, if there is a lease; None if the
            server does not answer.
        """
        arguments: list[Any] = [
            word for take in wanted for word in (take.bucket, repr(take.per_minute), repr(take.amount))
        ]
        lease_words = ("", 0, 0) if lease is None else lease
        if lease is not None:
            # Before it is asked for: whoever is cancelled meanwhile may have it.
            self._leases.setdefault(tenant, set()).add(lease)
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._keep_leases())
        keys = [f"pipeline:limits:{tenant}", f"pipeline:running:{tenant}"]
        try:
            arguments = [int(forced), *lease_words, repr(self._lease_s), *arguments]
            reply = await self._take(keys, arguments)
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
            for level, wait_s in zip(reply[::2], reply[1::2], strict=True)
        ]

    def release(self, tenant: str, lease: Lease) -> None:
        """Count the choices of a lease as finished, without waiting and whatever their outcome."""
        self._leases[tenant].discard(lease)
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
        # Else it ends by itself.
        with contextlib.suppress(BackendDown):
            key, redis = f"pipeline:running:{tenant}", self._redis
            await redis.run(lambda: redis.client.zrem(key, *_names(lease)))

    async def _keep_leases(self) -> None:
        """Renew what runs, as long as anything does."""
        while any(self._leases.values()):
            await asyncio.sleep(self._lease_s / 3)
            for tenant, leases in [*self._leases.items()]:
                if names := [name for lease in leases for name in _names(lease)]:
                    with contextlib.suppress(BackendDown):
                        key = f"pipeline:running:{tenant}"
                        await self._renew([key], [repr(self._lease_s), *names])


def _names(lease: Lease) -> list[str]:
    """Members of the sorted set, one for each choice."""
    return [f"{lease.name}:{number}" for number in range(1, lease.choices + 1)]
