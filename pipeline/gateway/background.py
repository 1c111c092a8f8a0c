"""Slots of a model for background requests, such as those of batches: they get the capacity that others leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType


class Preempted(Exception):
    """A request in the background has given its slot to another request; it is to be asked again from its start."""


class PreemptibleBlock:
    """A block of the current task that another task may end: the block then raises `Preempted`."""

    def __init__(self) -> None:
        self.preempted = False

    def preempt(self) -> None:
        """End the block, which has begun."""
        if not self.preempted:
            self.preempted = True
            self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Unless somebody else has cancelled the task besides.
        if self.preempted and kind is asyncio.CancelledError and self._task.uncancel() <= self._cancelling:
            raise Preempted from None


class BackgroundSlots:
    """The slots of a `pipeline.gateway.fair_queue.FairQueue` that no request in the foreground needs.

    A slot is given while no request in the foreground waits. When one comes and finds none free, the request here that
    began last is preempted: of all, its work is the least. Tenants take turns.
    """

    def __init__(self, most: int, has_free_slot: Callable[[], bool], changed: Callable[[], None]) -> None:
        """
        Args:
            most: slots at once.
            has_free_slot: tells whether the queue has a slot that no request in the foreground waits for.
            changed: called when a request has begun here, or a slot has become free.
        """
        self.most = most
        self._has_free_slot, self._changed = has_free_slot, changed
        self._running: Counter[str] = Counter()  # by tenant
        self._holders: list[PreemptibleBlock] = []  # the oldest first
        self._waiting: dict[asyncio.Future[None], str] = {}  # -> tenant; the oldest first

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def leaving(self) -> int:
        """Number of requests that have a slot, and are giving it back."""
        return sum(holder.preempted for holder in self._holders)

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        Raises:
            Preempted: the slot was needed for a request in the foreground.
        """
        await self._acquire(tenant)
        block = PreemptibleBlock()
        try:
            with block:
                self._holders.append(block)
                # A request in the foreground may have come since the slot was given.
                self._changed()
                yield
        finally:
            self._holders.remove(block)
            self._release(tenant)

    def preempt(self) -> None:
        """Take one slot back, if any is held."""
        holder = next((holder for holder in reversed(self._holders) if not holder.preempted), None)
        if holder is not None:
            holder.preempt()

    def fill(self) -> None:
        """Give the slots that are free."""
        while self._may_begin and (waiting := [future for future in self._waiting if not future.done()]):
            # Of the tenants with the fewest slots, the request that has waited the longest.
            future = min(waiting, key=lambda waiter: self._running[self._waiting[waiter]])
            self._running[self._waiting.pop(future)] += 1
            future.set_result(None)

    @property
    def _may_begin(self) -> bool:
        return self.running < self.most and self._has_free_slot()

    async def _acquire(self, tenant: str) -> None:
        if self._may_begin and not self._waiting:
            self._running[tenant] += 1
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = tenant
        try:
            await future
        except asyncio.CancelledError:
            # The slot may have been given at the moment of the cancellation.
            if self._waiting.pop(future, None) is None:
                self._release(tenant)
            raise

    def _release(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._changed()
