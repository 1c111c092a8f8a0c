"""Properties of queue, by a clock of the tests' own: who runs when, whatever arrives and whoever leaves."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.background import Preempted
from pipeline.gateway.errors import ApiError
from pipeline.gateway.fair_queue import FairQueue

S_PER_TOKEN = 0.01
PAUSES = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 1000)), min_size=1, max_size=25
)  # s before it, tokens


async def settle() -> None:
    """Let every task go as far as it gets."""
    for _ in range(5):
        await asyncio.sleep(0)


async def order_of(requests: Sequence[tuple[float, int]]) -> list[int]:
    """In which order requests of (time of arrival, tokens) run, if the only place is free when all have come."""
    now, ran = [0.0], list[int]()
    queue = FairQueue(1, max_waiting=100, s_per_token=S_PER_TOKEN, clock=lambda: now[0])

    async def ask(index: int) -> None:
        async with queue.slot(requests[index][1]):
            ran.append(index)

    tasks = []
    async with queue.slot(1):
        for index, (arrival, _) in enumerate(requests):
            now[0] = arrival
            tasks.append(asyncio.create_task(ask(index)))
            await settle()
        assert queue.waiting == len(requests)
    await asyncio.gather(*tasks)
    return ran


@given(PAUSES)
def test_everybody_runs_and_nobody_is_overtaken_by_much_later_ones(pauses: list[tuple[float, int]]) -> None:
    arrivals = list(itertools.accumulate(pause for pause, _ in pauses))
    requests = [(arrival, tokens) for arrival, (_, tokens) in zip(arrivals, pauses, strict=True)]
    ran = asyncio.run(order_of(requests))
    assert sorted(ran) == list(range(len(requests)))
    for earlier, later in itertools.combinations(ran, 2):
        if (
            earlier > later
        ):  # it came later and runs sooner: it is shorter, and did not come too late for that
            assert requests[earlier][1] < requests[later][1]
            assert requests[earlier][0] <= requests[later][0] + requests[later][1] * S_PER_TOKEN


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_tenants_take_turns_whatever_each_of_them_asks(requests: list[tuple[str, int]], places: int) -> None:
    """While several wait, none has two places more than another; of one tenant the shorter run first."""

    async def run() -> None:
        queue, running, ran = (
            FairQueue(places, max_waiting=100, clock=lambda: 0.0),
            Counter[str](),
            list[int](),
        )
        waiting = Counter(tenant for tenant, _ in requests)

        async def ask(index: int) -> None:
            tenant, tokens = requests[index]
            async with queue.slot(tokens, tenant):
                waiting[tenant] -= 1
                running[tenant] += 1
                ran.append(index)
                rivals = [running[other] for other, count in waiting.items() if count]
                assert running[tenant] <= min(rivals, default=running[tenant]) + 1
                await settle()
                running[tenant] -= 1

        async with AsyncExitStack() as stack:
            for _ in range(places):
                await stack.enter_async_context(queue.slot(1, "somebody"))
            tasks = [asyncio.create_task(ask(index)) for index in range(len(requests))]
            await settle()
        await asyncio.gather(*tasks)
        assert sorted(ran) == list(range(len(requests)))
        for tenant in "abc":
            own = [requests[index][1] for index in ran if requests[index][0] == tenant]
            assert own == sorted(own)

    asyncio.run(run())


def test_of_a_full_queue_the_tenant_with_the_most_gives_way() -> None:
    async def run() -> None:
        queue, refused = FairQueue(1, max_waiting=4), list[str]()

        async def ask(tenant: str) -> None:
            try:
                async with queue.slot(1, tenant):
                    pass
            except ApiError:
                refused.append(tenant)

        async with queue.slot(1, "a"):
            tasks = [asyncio.create_task(ask(tenant)) for tenant in "aaaabcdab"]
            await settle()
            assert sorted(refused) == ["a", "a", "a", "a", "b"]
        await asyncio.gather(*tasks)
        assert (len(refused), queue.running, queue.waiting) == (5, 0, 0)

    asyncio.run(run())


@given(
    places=st.integers(1, 4),
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "finish", "cancel", "pause", "resume"]), st.integers(0, 1000)),
        max_size=60,
    ),
)
def test_places_are_never_lost_nor_given_twice(places: int, steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        queue = FairQueue(places, max_waiting=5)
        asked: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        running, refused = set[int](), list[tuple[int, bool]]()
        paused = False

        async def ask(number: int, finish: asyncio.Event) -> None:
            try:
                async with queue.slot(number + 1, str(number % 3)):
                    running.add(number)
                    assert len(running) <= places
                    assert not paused, "a slot was given by a paused queue"
                    try:
                        await finish.wait()
                    finally:
                        running.discard(number)
            except ApiError as error:
                refused.append((error.status, error.retry_after_s is not None))

        for action, number in steps:
            if action == "ask":
                finish = asyncio.Event()
                asked.append((asyncio.create_task(ask(len(asked), finish)), finish))
            elif action in ("pause", "resume"):
                paused = action == "pause"
                queue.pause("ill") if paused else queue.resume()
            elif asked and action == "finish":
                asked[number % len(asked)][1].set()
            elif asked:
                asked[number % len(asked)][0].cancel()
            await settle()
            assert queue.running == len(running)
            assert not queue.waiting or queue.running == places or paused, (
                "nobody waits while a place is free"
            )
        paused = False
        queue.resume()
        for _, finish in asked:
            finish.set()
        ends = await asyncio.gather(*(task for task, _ in asked), return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        assert (queue.running, queue.waiting, queue.refused) == (0, 0, len(refused))
        assert set(refused) <= {(429, True), (503, True)}

    asyncio.run(run())


def test_cancelled_at_the_moment_of_admission_loses_no_place() -> None:
    async def run() -> None:
        queue = FairQueue(1, max_waiting=2)
        async with queue.slot(1):
            task = asyncio.create_task(queue.slot(1).__aenter__())
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.running == 0

    asyncio.run(run())


def test_while_it_is_paused_requests_wait_for_a_bounded_time() -> None:
    async def run() -> None:
        queue, ended, told = FairQueue(2, max_waiting=3), list[str | int](), set[tuple[bool, bool]]()

        async def ask(name: str, wait_s: float) -> None:
            try:
                async with queue.slot(1, wait_s=wait_s):
                    ended.append(name)
            except ApiError as error:
                ended.append(error.status)
                told.add(("the engine is gone" in error.message, error.retry_after_s is not None))

        async with queue.slot(1), queue.slot(1):
            early = asyncio.create_task(ask("early", 0.01))
            await settle()
            queue.pause("the engine is gone")
            await early
        assert (ended, queue.running) == ([503], 0)
        tasks = [
            asyncio.create_task(ask(name, wait_s)) for name, wait_s in (("a", 60), ("b", 0.01), ("c", 60))
        ]
        await tasks[1]
        assert (ended, queue.waiting) == ([503, 503], 2)
        await asyncio.gather(ask("d", 0.01), *(ask(name, 60) for name in "e"))
        assert ended[2:] == [503, 503], "one waited for too long, and for the other there was no room"
        queue.resume()
        await asyncio.gather(*tasks)
        assert (ended[4:], queue.running, queue.waiting) == (["a", "c"], 0, 0)
        assert told == {(True, True)}

    asyncio.run(run())


@given(st.lists(st.one_of(st.integers(0, 5), st.booleans()), max_size=12))
def test_slots_that_change_while_requests_wait(changes: list[int | bool]) -> None:
    """After each change as many run as may, fewer slots interrupt nobody, and a pause ends with all in their order."""

    async def run() -> list[int]:
        queue, leave, ran = FairQueue(2, max_waiting=100, clock=lambda: 0.0), asyncio.Event(), list[int]()

        async def ask(index: int) -> None:
            async with queue.slot(1):
                ran.append(index)
                await leave.wait()

        tasks = [asyncio.create_task(ask(index)) for index in range(8)]
        await settle()
        for change in changes:
            before = queue.running
            if isinstance(change, bool):
                queue.pause("ill") if change else queue.resume()
            else:
                queue.resize(change)
            await settle()
            may = 0 if queue.paused else queue.slots
            assert queue.running == max(before, may)
            assert queue.running + queue.waiting == len(tasks)
        leave.set()
        queue.resume()
        queue.resize(1)
        await asyncio.gather(*tasks)
        return ran

    assert asyncio.run(run()) == list(range(8))


@given(st.lists(st.sampled_from(["come", "come behind", "end", "end behind"]), max_size=40))
def test_the_background_has_no_slot_while_anybody_waits(steps: list[str]) -> None:
    """Whatever happens: it gets what others leave, gives it back at once, and is gone on with later."""

    async def run() -> None:
        queue, ends = (
            FairQueue(3, max_waiting=50, background=2),
            {True: asyncio.Event(), False: asyncio.Event()},
        )
        finished: Counter[bool] = Counter()

        async def hold(behind: bool) -> None:
            while True:
                try:
                    async with queue.slot(1, "b" if behind else "a", background=behind):
                        await ends[behind].wait()
                    finished[behind] += 1
                    return
                except Preempted:
                    continue

        tasks = []
        for step in steps:
            behind = step.endswith("behind")
            if step.startswith("come"):
                tasks.append(asyncio.create_task(hold(behind)))
            else:
                ends[behind].set()
                ends[behind] = asyncio.Event()
            for _ in range(20):
                await asyncio.sleep(0)
            assert queue.running + queue.background.running <= 3
            assert queue.background.running <= 2
            if queue.waiting:
                assert (queue.running, queue.background.running) == (3, 0)
            if queue.background.waiting:
                assert queue.background.running == 2 or queue.running + queue.background.running == 3
        for _ in range(100):
            for event in ends.values():
                event.set()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert (queue.running, queue.background.running, finished.total()) == (0, 0, len(tasks))

    asyncio.run(run())
