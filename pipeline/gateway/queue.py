"""Who may start next: tenants in turn, of each the short requests first; and when to say that it is too much.

A place that becomes free goes to the tenant that has the fewest; of several, to the one whose turn came longest ago. Of
a tenant's requests, each waits behind those whose arrival plus expected service lies earlier. A long one is thus
overtaken by short ones for a bounded time only: what arrives later than its own expected service comes after it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from pipeline.gateway.errors import ApiError

_SMOOTHING = 0.1  # of the mean service time

# When it is due, its number, and what it waits for; done once it does not wait any more.
_Waiter = tuple[float, int, asyncio.Future[None]]


class Admission:
    """Places of one deployment, for the tasks of one event loop."""

    def __init__(
        self,
        places: int,
        *,
        max_waiting: int,
        s_per_token: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            places: requests that run at the same time; as many as the engine takes.
            max_waiting: requests that wait beyond those. If there are more, one of the tenant is turned away that has
                the most of them.
            s_per_token: expected service of a token, by which long requests are put behind short ones.
        """
        self._places, self._max_waiting, self._s_per_token = places, max_waiting, s_per_token
        self._clock = clock
        self._running: Counter[str] = Counter()  # by tenant
        self._waiting: Counter[str] = Counter()  # by tenant, without zeros
        self._queues: dict[
            str, list[_Waiter]
        ] = {}  # heaps of the tenants in `_waiting`; with some that gave up
        self._turns: dict[str, int] = {}  # number of the last waiter of a tenant that got a place
        self._order = count()
        self._service_s = 1.0  # mean so far
        self.turned_away = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._waiting.total()

    @property
    def running(self) -> int:
        """Requests that have a place."""
        return self._running.total()

    @asynccontextmanager
    async def place(self, tokens: int, tenant: str = "") -> AsyncIterator[None]:
        """A place for a request of about so many tokens, prompt and answer together.

        Raises:
            ApiError: 429, with the time after which it is worth asking again.
        """
        await self._enter(tokens, tenant)
        began = self._clock()
        try:
            yield
        finally:
            self._service_s += _SMOOTHING * (self._clock() - began - self._service_s)
            self._leave(tenant)

    async def _enter(self, tokens: int, tenant: str = "") -> None:
        if self.running < self._places:  # then nobody waits
            self._running[tenant] += 1
            return
        if self.waiting >= self._max_waiting:
            self._turn_away(tenant)
        future = asyncio.get_running_loop().create_future()
        due = self._clock() + tokens * self._s_per_token
        heapq.heappush(self._queues.setdefault(tenant, []), (due, next(self._order), future))
        self._waiting[tenant] += 1
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._waits_no_more(tenant)
            elif future.exception() is None:
                self._leave(tenant)  # the place came at the same moment
            raise

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        for one in sorted(self._waiting, key=lambda one: (self._running[one], self._turns.get(one, -1))):
            queue = self._queues[one]
            while queue:
                future = heapq.heappop(queue)[2]
                if not future.done():
                    self._turns[one] = next(self._order)
                    self._running[one] += 1
                    self._waits_no_more(one)
                    future.set_result(None)
                    return

    def _waits_no_more(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._queues[tenant]

    def _turn_away(self, newcomer: str) -> None:
        """Raise for the newcomer, or let the last one go of a tenant that has more requests waiting."""
        self.turned_away += 1
        wait_s = (self.waiting + 1) / self._places * self._service_s
        text = "Too many requests are waiting; try again later"
        error = ApiError(429, text, code="overloaded", retry_after_s=wait_s)
        most = max(self._waiting, key=self._waiting.__getitem__, default=newcomer)
        if self._waiting[most] <= self._waiting[newcomer] + 1:
            raise error
        last = max((waiter for waiter in self._queues[most] if not waiter[2].done()), default=None)
        if last is not None:
            self._waits_no_more(most)
            last[2].set_exception(error)
