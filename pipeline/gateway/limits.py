"""Limits of a tenant: whatever is too much is answered by 429.

The tenant of a request is found in `pipeline.gateway.tenants`; tenants that want the same model wait in its
`pipeline.gateway.fair_queue`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from ctypes import Structure, byref, c_double, c_int64, memmove, sizeof
from dataclasses import dataclass
from math import ceil, inf

from pydantic import BaseModel, ConfigDict, Field

from pipeline.gateway.errors import ApiError
from pipeline.gateway.shared_redis import BucketTake, Lease, RedisBuckets

_NO_LOCK = nullcontext()


class TenantLimits(BaseModel):
    """Limits of one tenant; None is no limit.

    Each choice counts as a request of its own: two prompts with n=3 are six requests, a minute and at once.

    Attributes:
        reading_seconds_per_minute: processor time of reading requests beyond what their size explains, and time of
            engines on forms that they refuse.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    reading_seconds_per_minute: int | None = Field(default=10, ge=1)


class BucketLevel(Structure):
    """Level of a token bucket, and the time at which it was so, in seconds by the monotonic clock."""

    _fields_ = (("level", c_double), ("at", c_double))
    level: float
    at: float


class _Levels(Structure):
    _fields_ = (("requests", BucketLevel), ("tokens", BucketLevel), ("reading", BucketLevel))
    requests: BucketLevel
    tokens: BucketLevel
    reading: BucketLevel


class TenantUsage:
    """Usage of a tenant's limits, in memory that several processes may share.

    Attributes:
        levels: buckets of requests, of tokens, and of seconds of reading.
        exclusive: entered while the memory is read and changed.
    """

    def __init__(
        self,
        memory: bytearray | memoryview,
        process: int = 0,
        exclusive: AbstractContextManager[object] = _NO_LOCK,
    ) -> None:
        """
        Args:
            memory: `size` bytes.
            process: number of this process, from 0.
        """
        self.levels = _Levels.from_buffer(memory)
        processes = (memoryview(memory).nbytes - sizeof(_Levels)) // sizeof(c_int64)
        self._running = (c_int64 * processes).from_buffer(memory, sizeof(_Levels))
        self._process, self.exclusive = process, exclusive

    @staticmethod
    def size(processes: int) -> int:
        """Return the bytes of memory of one tenant."""
        return sizeof(_Levels) + processes * sizeof(c_int64)

    def reset(self, limits: TenantLimits, now: float) -> None:
        """Fill all buckets."""
        self.levels.requests = BucketLevel(limits.requests_per_minute or 0.0, now)
        self.levels.tokens = BucketLevel(limits.tokens_per_minute or 0.0, now)
        self.levels.reading = BucketLevel(limits.reading_seconds_per_minute or 0.0, now)

    def copy_levels(self, usage: TenantUsage) -> None:
        """Take over the levels of other memory."""
        memmove(byref(self.levels), byref(usage.levels), sizeof(_Levels))

    @property
    def running(self) -> int:
        """Choices that run, in all processes."""
        return sum(self._running)

    def count_running(self, choices: int) -> None:
        """Add to the choices that run in this process."""
        self._running[self._process] += choices

    def forget_process(self, process: int) -> None:
        """Count nothing any more as running in a process, which is gone."""
        self._running[process] = 0


@dataclass(slots=True)
class _TokenBucket:
    """Fills evenly, and holds a minute's worth."""

    unit: str
    per_minute: float
    state: BucketLevel

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is there; 0 if it is."""
        state = self.state
        # Another process may have read the clock a moment later.
        now = max(now, state.at)
        state.level = min(self.per_minute, state.level + (now - state.at) * self.per_minute / 60)
        state.at = now
        return max(0.0, (min(amount, self.per_minute) - state.level) / self.per_minute * 60)

    def take(self, amount: float, least: float = -inf) -> None:
        self.state.level = max(self.state.level - amount, least)

    def copy(self, level: float, now: float) -> None:
        """Take over the level that a bucket elsewhere has."""
        self.state.level, self.state.at = level, max(now, self.state.at)


class Tenant:
    """One tenant: its limits, and its usage of them."""

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
            name: "" for everybody where no keys are needed.
            clock: monotonic time in seconds.
            background: whether its requests only get slots of a model that others leave.
            reads_metrics: whether its keys read the figures of all tenants by name.
        """
        self.name, self.limits, self._clock = name, limits, clock
        self.background, self.reads_metrics = background, reads_metrics
        # Where several gateways share the buckets; then those of `usage` are copies, for when that cannot be reached.
        self.shared: RedisBuckets | None = None
        usage = TenantUsage(bytearray(TenantUsage.size(processes=1)))
        usage.reset(limits, clock())
        self.share(usage)

    def share(self, usage: TenantUsage) -> None:
        """Count in other memory from now on, such as that which several processes share."""
        limits, levels = self.limits, usage.levels
        self.usage = usage
        self._requests = _bucket("requests", limits.requests_per_minute, levels.requests)
        self._tokens = _bucket("tokens", limits.tokens_per_minute, levels.tokens)
        self._reading = _bucket("seconds of reading", limits.reading_seconds_per_minute, levels.reading)

    @property
    def running(self) -> int:
        """Choices that run."""
        return self.usage.running

    async def count_request(self) -> None:
        """Count a request before any of it is read, whatever its outcome.

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
                    yield f"x-ratelimit-{kind}-{bucket.unit}".encode(), value.encode()

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
            tokens: tokens of its prompts and, at most, of its answers, in all choices together.
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
            takes = [BucketTake(bucket.unit, bucket.per_minute, amount) for bucket, amount in wanted]
            states = await self.shared.take(self.name, takes, forced=forced, lease=lease)
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


def _bucket(unit: str, per_minute: int | None, state: BucketLevel) -> _TokenBucket | None:
    return None if per_minute is None else _TokenBucket(unit, per_minute, state)


def _too_many(bucket: _TokenBucket, wait_s: float) -> ApiError:
    text = f"Limit of {bucket.per_minute:g} {bucket.unit} a minute reached"
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
    minutes, seconds_left = divmod(seconds, 60)
    return f"{int(minutes)}m{seconds_left:.3g}s" if minutes else f"{seconds_left:.3g}s"
