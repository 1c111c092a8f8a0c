"""Who may start next: short requests before long ones, but nobody waits for ever; and when to say that it is too much.

A request waits behind those whose arrival plus expected service lies earlier. A long one is thus overtaken by short
ones for a bounded time only: what arrives later than its own expected service comes after it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from pipeline.gateway.errors import ApiError

_SMOOTHING = 0.1  # of the mean service time


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
            max_waiting: requests that wait beyond those; more are turned away.
            s_per_token: expected service of a token, by which long requests are put behind short ones.
        """
        self._free, self._max_waiting, self._s_per_token = places, max_waiting, s_per_token
        self._places, self._clock = places, clock
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._service_s = 1.0  # mean so far
        self.turned_away = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(not future.done() for _, _, future in self._queue)

    @property
    def running(self) -> int:
        """Requests that have a place."""
        return self._places - self._free

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncIterator[None]:
        """A place for a request of about so many tokens, prompt and answer together.

        Raises:
            ApiError: 429, with the time after which it is worth asking again.
        """
        await self._enter(tokens)
        began = self._clock()
        try:
            yield
        finally:
            self._service_s += _SMOOTHING * (self._clock() - began - self._service_s)
            self._leave()

    async def _enter(self, tokens: int) -> None:
        if self._free and not self.waiting:
            self._free -= 1
            return
        if self.waiting >= self._max_waiting:
            self.turned_away += 1
            wait_s = (self.waiting + 1) / self._places * self._service_s
            raise ApiError(
                429, "Too many requests are waiting; try again later", code="overloaded", retry_after_s=wait_s
            )
        future = asyncio.get_running_loop().create_future()
        due = self._clock() + tokens * self._s_per_token
        heapq.heappush(self._queue, (due, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._leave()  # the place came at the same moment
            raise

    def _leave(self) -> None:
        while self._queue:
            future = heapq.heappop(self._queue)[2]
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
