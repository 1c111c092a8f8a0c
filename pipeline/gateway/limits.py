"""Limits of a tenant: whatever is too much is answered by 429.

The tenant of a request is found in `pipeline.gateway.tenants`; tenants that want the same model wait in its
`pipeline.gateway.fair_queue`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from pipeline.gateway.errors import ApiError

_NO_LOCK = nullcontext()


class TenantLimits(BaseModel):
    """Limits of one tenant; None is no limit.

    Each choice counts as a request of its own: two prompts with n=3 are six requests, a minute and at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    # Processor time of reading requests beyond what their size explains, and time of engines on forms that they refuse.
    reading_seconds_per_minute: int | None = Field(default=10, ge=1)


@dataclass(slots=True)
class _TokenBucket:
    """Fills evenly, and holds a minute's worth. Its two numbers are `cells[at]`, the level, and when it was so."""

    what: str
    per_minute: float
    cells: MutableSequence[float]
    at: int

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0 if it is."""
        cells, at = self.cells, self.at
        # Another process may have read the clock a moment later.
        now = max(now, cells[at + 1])
        level = cells[at] = min(self.per_minute, cells[at] + (now - cells[at + 1]) * self.per_minute / 60)
        cells[at + 1] = now
        return max(0.0, (min(amount, self.per_minute) - level) / self.per_minute * 60)

    def take(self, amount: float, least: float = -inf) -> None:
        self.cells[self.at] = max(self.cells[self.at] - amount, least)

    def copy(self, level: float, now: float) -> None:
        """Take over the level that a bucket elsewhere has."""
        self.cells[self.at], self.cells[self.at + 1] = level, max(now, self.cells[self.at + 1])


_REQUESTS, _TOKENS, _READING, _RUNNING = 0, 2, 4, 6  # places among the numbers of a tenant


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has used of its limits, as numbers that several processes may share.

    Attributes:
        cells: level of the bucket of requests and when it was so (s, monotonic), the same for tokens and for seconds of
            reading, then how many choices run in each process.
        process: whose choices those of this process are, from 0.
        exclusive: entered while numbers are read and changed.
    """

    cells: MutableSequence[float]
    process: int = 0
    exclusive: AbstractContextManager[object] = _NO_LOCK

    @classmethod
    def unused(cls, limits: TenantLimits, now: float) -> TenantUsage:
        """Return the numbers of a tenant that has used nothing, for one process."""
        most = (limits.requests_per_minute, limits.tokens_per_minute, limits.reading_seconds_per_minute)
        return cls([*(cell for one in most for cell in (one or 0.0, now)), 0.0])

    @staticmethod
    def size(processes: int) -> int:
        """How many numbers a tenant has."""
        return _RUNNING + processes

    @property
    def running(self) -> int:
        """Choices that run, in all processes."""
        return int(sum(self.cells[_RUNNING:]))

    def count_running(self, choices: int) -> None:
        """Add to the choices that run in this process."""
        self.cells[_RUNNING + self.process] += choices

    def forget_process(self, process: int) -> None:
        """Count nothing any more as running in a process, which is gone."""
        self.cells[_RUNNING + process] = 0.0


class BucketTake(NamedTuple):
    """What is to be taken from one bucket of a tenant."""

    what: str  # name of the bucket
    per_minute: float
    amount: float


class BucketState(NamedTuple):
    """A bucket after something was taken from it, or was not."""

    level: float
    # Until as much is there as was wanted; 0 if it was.
    wait_s: float


class Lease(NamedTuple):
    """Choices of one request that are to run, of as many as a tenant may have at once on all gateways together."""

    name: str
    choices: int
    most: int


class SharedBuckets(Protocol):
    """What tenants use where several gateways share it: `redis_limits.RedisBuckets`."""

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
            tenant: name of the tenant.
            wanted: amounts; none of them more than once for the same bucket.
            forced: take what there is not, too, down to a minute's worth of debt.
            lease: choices that run until `release`, or this gateway is gone; None: none.

        Returns:
            The state of each bucket, and after them that of the choices that run, if there is a lease; None if they
            cannot be reached now.
        """
        ...

    def release(self, tenant: str, lease: Lease) -> None:
        """Count the choices of a lease as over, whatever became of it. Does not wait."""
        ...


class Tenant:
    """One tenant: its limits, and what it has used of them."""

    def __init__(
        self,
        name: str,
        limits: TenantLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        background: bool = False,
        reads_metrics: bool = False,
    ) -> None:
        """
        Args:
            name: of the tenant, "" for everybody where no keys are needed.
            limits: what it may use.
            clock: monotonic time in seconds.
            background: whether its requests only get slots of a model that others leave.
            reads_metrics: whether its keys read the figures of all tenants by name.
        """
        self.name, self.limits, self._clock = name, limits, clock
        self.background, self.reads_metrics = background, reads_metrics
        # Where several gateways share the buckets; then those of `usage` are copies, for when that cannot be reached.
        self.shared: SharedBuckets | None = None
        self.share(TenantUsage.unused(limits, clock()))

    def share(self, usage: TenantUsage) -> None:
        """Count in other numbers from now on, such as those that several processes share."""
        limits = self.limits
        self.usage = usage
        self._requests = self._bucket("requests", limits.requests_per_minute, _REQUESTS)
        self._tokens = self._bucket("tokens", limits.tokens_per_minute, _TOKENS)
        self._reading = self._bucket("seconds of reading", limits.reading_seconds_per_minute, _READING)

    @property
    def running(self) -> int:
        """Choices that run."""
        return self.usage.running

    async def count_request(self) -> None:
        """Count a request before any of it is read, whatever becomes of it.

        Raises:
            ApiError: 429, if the requests of this minute are used up.
        """
        await self._take(((self._requests, 1.0),))

    async def note_loss(self, request_id: str) -> int:  # noqa: ARG002
        """Take note that a server was lost with a request in flight.

        Returns:
            Losses of the request that are counted beyond the end of the gateway, as for the lines of batches; 0 if
            none are.
        """
        return 0

    def check_choices(self, choices: int) -> None:
        """Check that a request could ever run.

        Raises:
            ApiError: 400, if it has more choices than the tenant may have at once or a minute.
        """
        limits = self.limits
        for most, when in ((limits.concurrency, "at once"), (limits.requests_per_minute, "a minute")):
            if most is not None and choices > most:
                text = f"n: {choices} choices, each of which is a request of its own; this key may have {most} {when}"
                raise ApiError(400, text, param="n", code="too_many_choices")

    @property
    def has_rate_limits(self) -> bool:
        """Whether requests or tokens of a minute are limited."""
        return self._requests is not None or self._tokens is not None

    def rate_limit_headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield OpenAI's headers: the limits of a minute, what is left of them, and when all of it is there again."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                with self.usage.exclusive:
                    reset_s = bucket.wait_s(bucket.per_minute, self._clock())
                left = bucket.per_minute - reset_s / 60 * bucket.per_minute
                values = {
                    "limit": f"{bucket.per_minute:g}",
                    # Rounded down, but for what floating point takes from a whole number.
                    "remaining": f"{max(0, int(left + 1e-6))}",
                    "reset": _duration(reset_s),
                }
                for kind, value in values.items():
                    yield f"x-ratelimit-{kind}-{bucket.what}".encode(), value.encode()

    async def charge_tokens(self, tokens: int) -> None:
        """Charge the tokens of a prompt that was counted and refused, down to a minute's worth of debt."""
        await self._take(((self._tokens, float(tokens)),), forced=True)

    def check_reading(self) -> None:
        """Check that the requests of the last minute did not take so long to read that dear ones have to wait.

        Raises:
            ApiError: 429, if they did.
        """
        bucket = self._reading
        if bucket is not None:
            with self.usage.exclusive:
                wait_s = bucket.wait_s(0.0, self._clock())
            if wait_s > 0:
                raise _too_many(bucket, wait_s)

    async def charge_reading(self, seconds: float) -> None:
        """Charge time that a request took to read, down to a minute's worth of debt."""
        await self._take(((self._reading, seconds),), forced=True)

    @asynccontextmanager
    async def enforce_limits(self, tokens: int, choices: int = 1) -> AsyncIterator[None]:
        """Charge a request that `count_request` has counted, and count its choices as running within the block.

        Args:
            tokens: of its prompts, and at most of its answers, in all choices together.
            choices: number of answers.

        Raises:
            ApiError: 429, if that is more than the tenant may use now.
        """
        most = self.limits.concurrency
        usage = self.usage
        with usage.exclusive:
            if most is not None and usage.running + choices > most:
                raise _too_many_at_once(most)
            usage.count_running(choices)
        shared, lease = self.shared, None
        if shared is not None and most is not None:
            lease = Lease(secrets.token_hex(8), choices, most)
        try:
            # The first choice is what `count_request` has counted.
            await self._take(((self._requests, choices - 1.0), (self._tokens, float(tokens))), lease=lease)
            yield
        finally:
            with usage.exclusive:
                usage.count_running(-choices)
            if shared is not None and lease is not None:
                shared.release(self.name, lease)

    async def _take(
        self,
        amounts: Sequence[tuple[_TokenBucket | None, float]],
        *,
        forced: bool = False,
        lease: Lease | None = None,
    ) -> None:
        """Take from all buckets, or from none if one has too little; then raise ApiError."""
        wanted = [(bucket, amount) for bucket, amount in amounts if bucket is not None and amount]
        if not wanted and lease is None:
            return
        states = None
        if self.shared is not None:
            asked = [BucketTake(bucket.what, bucket.per_minute, amount) for bucket, amount in wanted]
            states = await self.shared.take(self.name, asked, forced=forced, lease=lease)
            if states is not None and lease is not None:
                *states, running = states
                if running.wait_s:
                    raise _too_many_at_once(lease.most)
        with self.usage.exclusive:
            now = self._clock()
            if states is None:
                waits = [0.0 if forced else bucket.wait_s(amount, now) for bucket, amount in wanted]
                if not any(waits):
                    for bucket, amount in wanted:
                        bucket.take(amount, least=-bucket.per_minute if forced else -inf)
            else:
                waits = [state.wait_s for state in states]
                for (bucket, _), state in zip(wanted, states, strict=True):
                    bucket.copy(state.level, now)
        for (bucket, _), wait_s in zip(wanted, waits, strict=True):
            if wait_s > 0:
                raise _too_many(bucket, wait_s)

    def _bucket(self, what: str, per_minute: int | None, at: int) -> _TokenBucket | None:
        return None if per_minute is None else _TokenBucket(what, per_minute, self.usage.cells, at)


def _too_many(bucket: _TokenBucket, wait_s: float) -> ApiError:
    text = f"Limit of {bucket.per_minute:g} {bucket.what} a minute reached"
    return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)


def _too_many_at_once(most: int) -> ApiError:
    return ApiError(
        429, f"Limit of {most} requests at once reached", code="concurrency_limit", retry_after_s=1
    )


def _duration(seconds: float) -> str:
    """A duration as OpenAI writes it.

    >>> [_duration(seconds) for seconds in (0, 0.0125, 8.64, 360)]
    ['0s', '13ms', '8.64s', '6m0s']
    """
    if seconds < 1:
        return f"{ceil(seconds * 1e3)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.3g}s" if minutes else f"{rest:.3g}s"
