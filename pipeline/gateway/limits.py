"""Rate limits of a tenant, and the fair queue of a model: whatever is too much is answered by 429.

The tenant of a request is found in `pipeline.gateway.tenants`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf

from pydantic import BaseModel, ConfigDict, Field

from pipeline.gateway.errors import ApiError

_SMOOTHING = 0.1  # of the mean service time

# Due time, sequence number, a future that is done once the request does not wait any more, and for how many seconds it
# waits for a model that is not ready.
_Waiter = tuple[float, int, asyncio.Future[None], float]
_RETRY_AFTER_S = 5.0


class TenantLimits(BaseModel):
    """Limits of one tenant; None is no limit.

    Each choice counts as a request of its own: two prompts with n=3 are six requests, a minute and at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)


@dataclass(slots=True)
class _TokenBucket:
    """Fills evenly, and holds a minute's worth."""

    per_minute: float
    level: float
    at: float  # s, by the tenant's clock

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0 if it is."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (min(amount, self.per_minute) - self.level) / self.per_minute * 60)

    def take(self, amount: float, least: float = -inf) -> None:
        self.level = max(self.level - amount, least)


class Tenant:
    """One tenant: its limits, and what it has used of them."""

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            name: of the tenant, "" for everybody where no keys are needed.
            limits: what it may use.
            clock: monotonic time in seconds.
        """
        self.name, self.limits, self._clock = name, limits, clock
        self.running = 0  # choices
        self._requests = self._bucket(limits.requests_per_minute)
        self._tokens = self._bucket(limits.tokens_per_minute)

    def count_request(self) -> None:
        """Count a request before any of it is read, whatever becomes of it.

        Raises:
            ApiError: 429, if the requests of this minute are used up.
        """
        self._take(((self._requests, 1.0, "requests"),))

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

    def charge_tokens(self, tokens: int) -> None:
        """Charge the tokens of a prompt that was counted and refused, down to a minute's worth of debt."""
        if self._tokens is not None:
            self._tokens.take(tokens, least=-self._tokens.per_minute)

    @contextmanager
    def enforce_limits(self, tokens: int, choices: int = 1) -> Iterator[None]:
        """Charge a request that `count_request` has counted, and count its choices as running within the block.

        Args:
            tokens: of its prompts, and at most of its answers, in all choices together.
            choices: number of answers.

        Raises:
            ApiError: 429, if that is more than the tenant may use now.
        """
        most = self.limits.concurrency
        if most is not None and self.running + choices > most:
            text = f"Limit of {most} requests at once reached"
            raise ApiError(429, text, code="concurrency_limit", retry_after_s=1)
        # The first choice is what `count_request` has counted.
        further = (self._requests, choices - 1.0, "requests")
        self._take((further, (self._tokens, float(tokens), "tokens")))
        self.running += choices
        try:
            yield
        finally:
            self.running -= choices

    def _take(self, wanted: Sequence[tuple[_TokenBucket | None, float, str]]) -> None:
        """Take from all buckets, or from none if one has too little."""
        now = self._clock()
        for bucket, amount, what in wanted:
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                text = f"Limit of {bucket.per_minute:g} {what} a minute reached"
                raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)
        for bucket, amount, _ in wanted:
            if bucket is not None:
                bucket.take(amount)

    def _bucket(self, per_minute: int | None) -> _TokenBucket | None:
        return None if per_minute is None else _TokenBucket(per_minute, per_minute, self._clock())


class FairQueue:
    """Slots of one model, for the tasks of one event loop.

    Tenants take turns, and of one tenant's requests short ones go first. A slot that becomes free goes to the tenant
    that holds the fewest; among equals, to the one whose last turn is the longest ago. A tenant's requests are ordered
    by arrival plus expected service time, so that a long one is overtaken for a bounded time only: a request that
    arrives later than the long one's own expected service comes after it.

    While the queue is paused, because the model is not ready, no slot is given: requests wait, each for a bounded time.
    """

    def __init__(
        self,
        slots: int,
        *,
        max_waiting: int,
        s_per_token: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            slots: requests that run at the same time; as many as the engine takes.
            max_waiting: requests that may wait besides. Beyond that, one is refused of the tenant that has the most
                of them waiting.
            s_per_token: expected service time of a token, in seconds, by which long requests are put behind short ones.
            clock: monotonic time in seconds.
        """
        self._slots, self._max_waiting, self._s_per_token = slots, max_waiting, s_per_token
        self._clock = clock
        self._running: Counter[str] = Counter()  # by tenant
        self._waiting: Counter[str] = Counter()  # by tenant, without zeros
        # Heaps of the tenants in `_waiting`. Waiters that gave up stay in them until they are popped.
        self._heaps: dict[str, list[_Waiter]] = {}
        self._last_turns: dict[
            str, int
        ] = {}  # by tenant: sequence number of the turn in which it last got a slot
        self._sequence = count()
        self._mean_service_s = 1.0
        self._paused = ""  # why; empty if it is not
        self._timers: dict[asyncio.Future[None], asyncio.TimerHandle] = {}  # of waiters, while paused
        self.refused = 0

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._waiting.total()

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return self._running.total()

    @property
    def slots(self) -> int:
        """Requests that run at the same time."""
        return self._slots

    def resize(self, slots: int) -> None:
        """Change the number of slots. Requests that have one keep it, also where there are fewer from now on."""
        self._slots = slots
        self._fill()

    @property
    def paused(self) -> bool:
        """Whether no slots are given."""
        return bool(self._paused)

    def pause(self, reason: str) -> None:
        """Let all requests wait that have no slot, until `resume`.

        Args:
            reason: why the model is not ready, for those who wait for too long.
        """
        began, self._paused = not self._paused, reason or "the model is not ready"
        if began:
            for tenant, heap in self._heaps.items():
                for _, _, future, wait_s in heap:
                    self._limit_wait(future, tenant, wait_s)

    def resume(self) -> None:
        """Give slots again."""
        self._paused = ""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._fill()

    @asynccontextmanager
    async def slot(
        self, tokens: int, tenant: str = "", *, wait_s: float = inf, arrived: float | None = None
    ) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        Args:
            tokens: of the prompt and, at most, of the answer.
            tenant: name of the tenant.
            wait_s: how long to wait while the queue is paused, in seconds.
            arrived: when the request arrived, by the queue's clock; None is now.

        Raises:
            ApiError: 429, with the time after which it is worth asking again; 503, if the model is not ready and the
                wait for it is over.
        """
        await self._acquire(tokens, tenant, wait_s, self._clock() if arrived is None else arrived)
        began = self._clock()
        try:
            yield
        finally:
            self._mean_service_s += _SMOOTHING * (self._clock() - began - self._mean_service_s)
            self._release(tenant)

    async def _acquire(self, tokens: int, tenant: str, wait_s: float, arrived: float) -> None:
        # While a slot is free, no request waits.
        if self._has_free_slot:
            self._running[tenant] += 1
            return
        if self.waiting >= self._max_waiting:
            self._refuse_one(tenant)
        future = asyncio.get_running_loop().create_future()
        due = arrived + tokens * self._s_per_token
        heapq.heappush(self._heaps.setdefault(tenant, []), (due, next(self._sequence), future, wait_s))
        self._waiting[tenant] += 1
        if self._paused:
            self._limit_wait(future, tenant, wait_s)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._count_out(tenant)
            elif future.exception() is None:
                # The slot was given at the moment of the cancellation.
                self._release(tenant)
            raise
        finally:
            if timer := self._timers.pop(future, None):
                timer.cancel()

    def _limit_wait(self, future: asyncio.Future[None], tenant: str, wait_s: float) -> None:
        def give_up() -> None:
            if not future.done():
                self._count_out(tenant)
                future.set_exception(self._not_ready(f"was not ready for {wait_s:g} s"))

        if wait_s < inf:
            self._timers[future] = asyncio.get_running_loop().call_later(wait_s, give_up)

    def _not_ready(self, what: str) -> ApiError:
        text = f"The model {what}: {self._paused}"
        return ApiError(503, text, code="unavailable", retry_after_s=_RETRY_AFTER_S)

    def _release(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._fill()

    @property
    def _has_free_slot(self) -> bool:
        return self.running < self._slots and not self._paused

    def _fill(self) -> None:
        """Give all free slots to requests that wait."""
        while self._has_free_slot and self._give_slot():
            pass

    def _give_slot(self) -> bool:
        """Give a slot to the request whose turn it is. Returns whether one waits."""
        for tenant in sorted(
            self._waiting, key=lambda name: (self._running[name], self._last_turns.get(name, -1))
        ):
            heap = self._heaps[tenant]
            while heap:
                future = heapq.heappop(heap)[2]
                if not future.done():
                    self._last_turns[tenant] = next(self._sequence)
                    self._running[tenant] += 1
                    self._count_out(tenant)
                    future.set_result(None)
                    return True
        return False

    def _count_out(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._heaps[tenant]

    def _refuse_one(self, newcomer: str) -> None:
        """Raise for the newcomer, or refuse the last waiter of a tenant that has more requests waiting."""
        self.refused += 1
        wait_s = (self.waiting + 1) / self._slots * self._mean_service_s
        text = "Too many requests are waiting; try again later"
        error = ApiError(429, text, code="overloaded", retry_after_s=wait_s)
        if self._paused:
            error = self._not_ready("is not ready, and too many requests wait for it")
        most = max(self._waiting, key=self._waiting.__getitem__, default=newcomer)
        if self._waiting[most] <= self._waiting[newcomer] + 1:
            raise error
        last = max((waiter for waiter in self._heaps[most] if not waiter[2].done()), default=None)
        if last is not None:
            self._count_out(most)
            last[2].set_exception(error)
