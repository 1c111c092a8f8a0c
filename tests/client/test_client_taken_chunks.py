"""Chunks that are taken in the event loop as they come, past the task that reads the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pipeline.client import (
    AsyncClient,
    AsyncStream,
    BetweenTokensDeadline,
    Cancelled,
    Chunk,
    ServerLost,
    Timeouts,
)
from pipeline.client.testing import Ending, FakeServer, Reply

WORDS = [f"w{number} " for number in range(40)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def read_all(stream: AsyncStream, take: Callable[[Chunk], bool]) -> None:
    async with stream:
        stream.take_chunk = take
        async for _ in stream:
            pass


@pytest.mark.parametrize("every", [1, 2, 7])
def test_each_chunk_is_taken_or_read_once_and_in_order(every: int) -> None:
    """The task gets one of so many."""
    taken: list[Chunk] = []
    all_chunks: list[Chunk] = []

    def take(chunk: Chunk) -> bool:
        if chunk.index % every == 0:
            return False
        taken.append(chunk)
        all_chunks.append(chunk)
        return True

    async def work() -> None:
        async with AsyncClient(server.url) as client, client.stream("Hi", max_tokens=100) as stream:
            stream.take_chunk = take
            async for chunk in stream:
                all_chunks.append(chunk)
                # What comes meanwhile waits for the task, and is not taken before what it has.
                await asyncio.sleep(0.002)
            assert stream.answer().text == "".join(WORDS)
            assert stream.stats.chunks == len(WORDS)

    with FakeServer(Reply(WORDS, delay_s=0.001)) as server:
        run(work())
    assert [chunk.index for chunk in all_chunks] == list(range(len(all_chunks)))
    assert "".join(chunk.text for chunk in all_chunks) == "".join(WORDS)
    assert all(chunk.finish_reason is None for chunk in taken)
    assert all_chunks[-1].finish_reason is not None
    assert bool(taken) is (every > 1)


def test_the_last_chunk_is_for_the_task() -> None:
    read: list[Chunk] = []

    async def work() -> None:
        async with AsyncClient(server.url) as client, client.stream("Hi", max_tokens=100) as stream:
            stream.take_chunk = lambda _: True
            read.extend([chunk async for chunk in stream])

    with FakeServer(Reply(WORDS)) as server:
        run(work())
    assert [chunk.finish_reason for chunk in read] == ["stop"]


def test_what_taking_raises_reaches_the_reader() -> None:
    def take(chunk: Chunk) -> bool:
        raise ValueError(chunk.text)

    async def work() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(ValueError, match=WORDS[0]):
                await read_all(client.stream("Hi", max_tokens=100), take)

    with FakeServer(Reply(WORDS, ending=Ending.HANG)) as server:
        run(work())
        assert server.requests[0].stopped.wait(20)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(WORDS, ending=Ending.LOST), ServerLost),
        (Reply(WORDS, delay_s=0.001, ending=Ending.HANG), BetweenTokensDeadline),
    ],
)
def test_an_answer_that_breaks_off_while_its_chunks_are_taken(reply: Reply, error: type[Exception]) -> None:
    async def work() -> None:
        async with AsyncClient(server.url, timeouts=Timeouts(between_tokens_s=0.5)) as client:
            stream = client.stream("Hi", max_tokens=100)
            with pytest.raises(error):
                await read_all(stream, lambda _: True)
            assert stream.text == "".join(WORDS)

    with FakeServer(reply) as server:
        run(work())


@pytest.mark.parametrize("by_task", [False, True])
def test_a_stream_that_is_cancelled_while_its_chunks_are_taken(*, by_task: bool) -> None:
    """By its task, or by `cancel`."""
    count = 0

    async def work() -> None:
        begun = asyncio.Event()

        def take(_: Chunk) -> bool:
            nonlocal count
            count += 1
            begun.set()
            return True

        async with AsyncClient(server.url) as client:
            stream = client.stream("Hi", max_tokens=10_000)
            task = asyncio.create_task(read_all(stream, take))
            await begun.wait()
            if by_task:
                task.cancel()
            else:
                stream.cancel()
            with pytest.raises(asyncio.CancelledError if by_task else Cancelled):
                await task
            ended = count
            await asyncio.sleep(0.05)
            assert count == ended

    with FakeServer(Reply(["x "] * 10_000, delay_s=0.002)) as server:
        run(work())
        assert server.requests[0].stopped.wait(20)
