"""Who starts next, and who is turned away."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import FairQueue


def order_of(tokens: list[int], *, pause_s: float = 0.0) -> list[int]:
    """In which order requests of so many tokens run, one place, all waiting behind a first one."""

    async def run() -> list[int]:
        queue, ran = FairQueue(1, max_waiting=100, s_per_token=0.001), []

        async def ask(index: int) -> None:
            async with queue.slot(tokens[index]):
                ran.append(index)

        async with queue.slot(1):
            tasks = []
            for index in range(len(tokens)):
                tasks.append(asyncio.create_task(ask(index)))
                await asyncio.sleep(pause_s)
        await asyncio.gather(*tasks)
        return ran

    return asyncio.run(run())


def test_short_requests_come_before_long_ones() -> None:
    assert order_of([1000, 10, 500, 20]) == [1, 3, 2, 0]


def test_equal_ones_in_the_order_of_arrival() -> None:
    assert order_of([50] * 5) == [0, 1, 2, 3, 4]


def test_a_long_one_does_not_wait_for_ever() -> None:
    # one of 100 tokens is put back by 100 ms; short ones that arrive later than that come after it
    assert order_of([100, 1, 1, 1, 1, 1, 1, 1], pause_s=0.03).index(0) < 6


def test_whoever_gives_up_waiting_frees_the_place_for_the_next() -> None:
    async def run() -> None:
        queue = FairQueue(1, max_waiting=2)

        async def ask() -> None:
            async with queue.slot(1):
                await asyncio.sleep(0)

        async with queue.slot(1):
            first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as refused:
                await queue._acquire(1)
            assert refused.value.status == 429
            assert refused.value.retry_after_s is not None
            first.cancel()
            await asyncio.sleep(0)
            assert queue.waiting == 1
        await asyncio.wait_for(second, 1)
        assert (queue.running, queue.waiting) == (0, 0)

    asyncio.run(run())


def test_cancelled_at_the_moment_of_admission_loses_no_place() -> None:
    async def run() -> None:
        queue = FairQueue(1, max_waiting=2)
        async with queue.slot(1):
            task = asyncio.create_task(queue._acquire(1))
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.running == 0

    asyncio.run(run())
