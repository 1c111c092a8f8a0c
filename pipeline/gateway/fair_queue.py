"""The fair queue of a model: who gets a slot when, in the foreground and in the background.

Whatever is too much is answered by 429. What a tenant may use at all is in `pipeline.gateway.limits`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from pipeline.gateway.background import BackgroundSlots
from pipeline.gateway.blame import Attempt, Work
from pipeline.gateway.errors import ApiError
from pipeline.gateway.lost_servers import LostServers

_SMOOTHING = 0.1  # of the mean service time

_RETRY_AFTER_S = 5.0


class _Waiter(NamedTuple):
    """A request that waits for a slot.

    Attributes:
        due: time by which a tenant's requests are ordered.
        number: number of the request, by arrival.
        future: done once the request does not wait any more, with its attempt if it has a slot and `work`.
        wait_s: seconds that it waits while the queue is paused.
        work: identity of the request if a server is lost with it; None if it goes to no server.
    """

    due: float
    number: int
    future: asyncio.Future[Attempt | None]
    wait_s: float
    work: Work | None


class ModelQueue(Protocol):
    """Slots of one model: a `FairQueue`, whose members these are, or a worker's part of its parent's."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def background_slots(self) -> int: ...
    @property
    def loss_events(self) -> Mapping[str, int]: ...
    def resize(self, slots: int) -> None: ...
    def slot(
        self,
        tokens: int,
        tenant: str = "",
        *,
        wait_s: float = inf,
        arrived: float | None = None,
        background: bool = False,
        work: Work | None = None,
    ) -> AbstractAsyncContextManager[None]: ...


class FairQueue:
    """Slots of one model, for the tasks of one event loop.

    Tenants take turns, and of one tenant's requests short ones go first. A slot that becomes free goes to the tenant
    that holds the fewest; among equals, to the one whose last turn is the longest ago. A tenant's requests are ordered
    by arrival plus expected service time, so that a long one is overtaken for a bounded time only: a request that
    arrives later than the long one's own expected service comes after it.

    While the queue is paused, because the model is not ready, no slot is given: requests wait, each for a bounded time.
    After the loss of a server, requests that were in flight there wait for their tenant's turn: see `lost_servers`.

    Attributes:
        slots: requests that run at the same time.
        paused: why no slots are given; empty if they are.
        lost_servers: blame for losses.
        refused: requests that were too many.
    """

    def __init__(
        self,
        slots: int,
        *,
        max_waiting: int,
        background: int | None = None,
        s_per_token: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            slots: requests that run at the same time; as many as the engine takes.
            max_waiting: requests that may wait besides. Beyond that, one is refused of the tenant that has the most
                of them waiting.
            background: slots that requests in the background may have at once; None: half of all.
            s_per_token: expected service time of a token, in seconds, by which long requests are put behind short ones.
            clock: monotonic time in seconds.
        """
        self.slots, self._max_waiting, self._s_per_token = slots, max_waiting, s_per_token
        self.batch_slots = background
        self._clock = clock
        self.lost_servers = LostServers(clock)
        self._running: Counter[str] = Counter()  # by tenant
        self._waiting: Counter[str] = Counter()  # by tenant, without zeros
        # Heaps of the tenants in `_waiting`. Waiters that gave up stay in them until they are popped.
        self._heaps: dict[str, list[_Waiter]] = {}
        # By tenant: sequence number of the turn in which it last got a slot.
        self._last_turns: dict[str, int] = {}
        self._sequence = count()
        self._mean_service_s = 1.0
        self.paused = ""
        # Of waiters, while paused.
        self._timers: dict[asyncio.Future[Attempt | None], asyncio.TimerHandle] = {}
        self.refused = 0
        self.background = BackgroundSlots(
            self.background_slots, lambda: self._has_free_slot and not self._waiting, self._fill
        )

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._waiting.total()

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return self._running.total()

    @property
    def loss_events(self) -> Mapping[str, int]:
        """Counts of lost servers, quarantined requests, and tenants that have to cool down."""
        judge = self.lost_servers.judge
        return {"lost": judge.losses, "quarantined": judge.quarantined, "cool_down": judge.cool_downs}

    def resize(self, slots: int) -> None:
        """Change the number of slots. Requests that have one keep it, also where there are fewer from now on."""
        self.slots = slots
        self.background.most = self.background_slots
        self._fill()

    def pause(self, reason: str) -> None:
        """Let all requests wait that have no slot, until `resume`.

        Args:
            reason: why the model is not ready, for those who wait for too long.
        """
        began, self.paused = not self.paused, reason or "the model is not ready"
        if began:
            for tenant, heap in self._heaps.items():
                for waiter in heap:
                    self._limit_wait(waiter.future, tenant, waiter.wait_s)

    def resume(self) -> None:
        """Give slots again."""
        self.paused = ""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._fill()

    @asynccontextmanager
    async def slot(
        self,
        tokens: int,
        tenant: str = "",
        *,
        wait_s: float = inf,
        arrived: float | None = None,
        background: bool = False,
        work: Work | None = None,
    ) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        Args:
            tokens: tokens of the prompt and, at most, of the answer.
            wait_s: how long to wait while the queue is paused, in seconds.
            arrived: when the request arrived, by the queue's clock; None is now.
            background: whether it only gets a slot that no other request waits for, however long that takes. A suspect
                of the loss of a server waits for its tenant's turn instead.
            work: the request that is sent within the block. Leaving the block by the loss of its server counts as
                one; leaving it without an error, as an answer.

        Raises:
            ApiError: 429, with the time after which it is worth asking again; 503, if the model is not ready and the
                wait for it is over; what `LostServers.refusal` returns.
            Preempted: a slot in the background was needed for another request.
        """
        if (refused := self._refusal(work)) is not None:
            raise refused
        if background and not (work is not None and self.lost_servers.is_suspect(work)):
            async with self.background.slot(tenant):
                with self._sending(self._begin(work)):
                    yield
            return
        arrived = self._clock() if arrived is None else arrived
        attempt = await self._acquire(tokens, tenant, wait_s, arrived, work)
        began = self._clock()
        try:
            with self._sending(attempt):
                yield
        finally:
            self._mean_service_s += _SMOOTHING * (self._clock() - began - self._mean_service_s)
            self._release(tenant)

    def _begin(self, work: Work | None) -> Attempt | None:
        return None if work is None else self.lost_servers.begin(work)

    def _sending(self, attempt: Attempt | None) -> AbstractContextManager[None]:
        return nullcontext() if attempt is None else self.lost_servers.attempt(attempt, self._fill)

    async def _acquire(
        self, tokens: int, tenant: str, wait_s: float, arrived: float, work: Work | None
    ) -> Attempt | None:
        # While a slot is free, no request waits, but for those that wait for the end of another turn.
        comes_last = work is not None and work.alone and self._waiting
        if self._has_free_slot and not comes_last and self._may_begin(work):
            self._running[tenant] += 1
            return self._begin(work)
        if self.waiting >= self._max_waiting:
            self._refuse_one(tenant)
        future: asyncio.Future[Attempt | None] = asyncio.get_running_loop().create_future()
        due = arrived + tokens * self._s_per_token
        waiter = _Waiter(due, next(self._sequence), future, wait_s, work)
        heapq.heappush(self._heaps.setdefault(tenant, []), waiter)
        self._waiting[tenant] += 1
        self._preempt()
        if self.paused:
            self._limit_wait(future, tenant, wait_s)
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._count_out(tenant)
            elif future.exception() is None:
                # The slot was given at the moment of the cancellation.
                if (attempt := future.result()) is not None:
                    self.lost_servers.give_up(attempt)
                self._release(tenant)
            raise
        finally:
            if timer := self._timers.pop(future, None):
                timer.cancel()

    def _limit_wait(self, future: asyncio.Future[Attempt | None], tenant: str, wait_s: float) -> None:
        def give_up() -> None:
            if not future.done():
                self._count_out(tenant)
                future.set_exception(self._not_ready(f"was not ready for {wait_s:g} s"))

        if wait_s < inf:
            self._timers[future] = asyncio.get_running_loop().call_later(wait_s, give_up)

    def _not_ready(self, problem: str) -> ApiError:
        text = f"The model {problem}: {self.paused}"
        return ApiError(503, text, code="unavailable", retry_after_s=_RETRY_AFTER_S)

    def _release(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._fill()

    @property
    def _has_free_slot(self) -> bool:
        return self.running + self.background.running < self.slots and not self.paused

    @property
    def background_slots(self) -> int:
        """Requests in the background that run at the same time."""
        return max(1, self.slots // 2) if self.batch_slots is None else self.batch_slots

    def _fill(self) -> None:
        """Give all free slots to requests that wait."""
        while self._has_free_slot and self._give_slot():
            pass
        self._preempt()
        self.background.fill()

    def _preempt(self) -> None:
        """Take a slot back from the background for each request that waits for one."""
        if self.background.running and not self.paused and not self._has_free_slot:
            for _ in range(self.waiting - self.background.leaving):
                self.background.preempt()

    def _give_slot(self) -> bool:
        """Give a slot to the request whose turn it is. Returns whether there is one."""
        for alone in (False, True):
            for tenant in sorted(
                self._waiting, key=lambda name: (self._running[name], self._last_turns.get(name, -1))
            ):
                if (waiter := self._pop_next(tenant, alone=alone)) is not None:
                    self._last_turns[tenant] = next(self._sequence)
                    self._running[tenant] += 1
                    self._count_out(tenant)
                    waiter.future.set_result(self._begin(waiter.work))
                    return True
        return False

    def _pop_next(self, tenant: str, *, alone: bool) -> _Waiter | None:
        """Take a tenant's first request that may go out now; refuse those that were blamed while they waited.

        `alone`: also those that have turns of their own, which come after all others.
        """
        heap, blocked = self._heaps[tenant], list[_Waiter]()
        first = None
        while heap and first is None:
            waiter = heapq.heappop(heap)
            if waiter.future.done():
                continue
            comes_last = waiter.work is not None and waiter.work.alone and not alone
            if comes_last or not self._may_begin(waiter.work):
                blocked.append(waiter)
            elif (refused := self._refusal(waiter.work)) is not None:
                self._count_out(tenant)
                waiter.future.set_exception(refused)
            else:
                first = waiter
        for waiter in blocked:
            heapq.heappush(heap, waiter)
        return first

    def _refusal(self, work: Work | None) -> ApiError | None:
        return None if work is None else self.lost_servers.refusal(work)

    def _may_begin(self, work: Work | None) -> bool:
        return work is None or self.lost_servers.may_begin(work)

    def _count_out(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._heaps[tenant]

    def _refuse_one(self, newcomer: str) -> None:
        """Raise for the newcomer, or refuse the last waiter of a tenant that has more requests waiting."""
        self.refused += 1
        wait_s = (self.waiting + 1) / self.slots * self._mean_service_s
        text = "Too many requests are waiting; try again later"
        error = ApiError(429, text, code="overloaded", retry_after_s=wait_s)
        if self.paused:
            error = self._not_ready("is not ready, and too many requests wait for it")
        most = max(self._waiting, key=self._waiting.__getitem__, default=newcomer)
        if self._waiting[most] <= self._waiting[newcomer] + 1:
            raise error
        last = max((waiter for waiter in self._heaps[most] if not waiter.future.done()), default=None)
        if last is not None:
            self._count_out(most)
            last.future.set_exception(error)
