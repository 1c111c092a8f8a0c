"""Writes of a streamed body to a client that may read slowly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.api.sse import ReaderTooSlow, WriteCoalescer


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12))
def test_everything_arrives_once_and_in_order(steps: list[tuple[int, int]]) -> None:
    """Turns of the event loop before each body, and before sending it is done."""
    sent: list[bytes] = []
    ends: list[bool] = []
    slow = [turns for _, turns in steps] or [0]

    async def send(message: Any) -> None:
        for _ in range(slow[len(sent) % len(slow)]):
            await asyncio.sleep(0)
        sent.append(message["body"])
        ends.append(not message.get("more_body", False))

    async def work() -> None:
        async with WriteCoalescer(send) as body:
            for number, (turns, _) in enumerate(steps):
                for _ in range(turns):
                    await asyncio.sleep(0.0006)
                await body.put(b"%d," % number)

    asyncio.run(work())
    assert b"".join(sent) == b"".join(b"%d," % number for number in range(len(steps)))
    assert ends == [False] * (len(ends) - 1) + [True]


def test_the_first_goes_out_at_once_and_what_follows_fast_goes_together() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        async with WriteCoalescer(send) as body:
            await body.put(b"first")
            assert sent == [b"first"]
            for _ in range(100):
                await body.put(b".")
        assert len(sent) <= 2 + (clock() - start) / 0.001
        assert b"".join(sent) == b"first" + b"." * 100

    asyncio.run(work())


def test_the_more_streams_are_open_the_fewer_writes_each_has() -> None:
    streams, gap_s, writes = 30, 0.006, 0

    async def send(_: Any) -> None:
        nonlocal writes
        writes += 1

    async def stream(all_are_open: asyncio.Barrier) -> None:
        async with WriteCoalescer(send) as body:
            await all_are_open.wait()
            for _ in range(40):
                await body.put(b".")
                await asyncio.sleep(0.0005)
            await all_are_open.wait()

    async def work() -> None:
        all_are_open, clock = asyncio.Barrier(streams), asyncio.get_running_loop().time
        start = clock()
        await asyncio.gather(*(stream(all_are_open) for _ in range(streams)))
        assert writes <= streams * (2 + (clock() - start) / gap_s)

    asyncio.run(work())


class Connection:
    """Has room but for some writes of a list, each of which is then read after so many turns of the event loop."""

    def __init__(self, slow: list[int]) -> None:
        self._slow, self.sent = slow, [b""]

    @property
    def congested(self) -> bool:
        return bool(self._turns)

    @property
    def _turns(self) -> int:
        return self._slow[len(self.sent) % len(self._slow)]

    def abort(self) -> None:
        """Nobody waits for long."""

    async def send(self, message: Any) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        self.sent.append(message["body"])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 1, 40_000])), max_size=12),
    st.lists(st.sampled_from([0, 0, 3]), min_size=1, max_size=5),
)
def test_what_is_put_without_waiting_arrives_in_order(steps: list[tuple[int, int]], slow: list[int]) -> None:
    """Turns of the event loop before each body, and how often it is repeated."""
    put = [b"%d," % number * times for number, (_, times) in enumerate(steps)]

    async def work() -> None:
        connection = Connection(slow)
        async with WriteCoalescer(connection.send, connection) as body:
            for piece, (turns, _) in zip(put, steps, strict=True):
                for _ in range(turns):
                    await asyncio.sleep(0.0006)
                if body.has_room:
                    body.put_now(piece)
                else:
                    await body.put(piece)
        assert b"".join(connection.sent) == b"".join(put)

    asyncio.run(work())


def test_with_room_nothing_is_waited_for() -> None:
    async def work() -> None:
        connection = Connection([0])
        async with WriteCoalescer(connection.send, connection) as body:
            rooms = [body.has_room]
            await body.put(b"first")
            await asyncio.sleep(0.002)
            assert [*rooms, body.has_room] == [False, True], "first the response has to begin"
            body.put_now(b"second")
            assert connection.sent == [b"", b"first", b"second"]

    asyncio.run(work())


def test_what_sending_raises_later_reaches_whoever_puts() -> None:
    class Broken(Connection):
        async def send(self, message: Any) -> None:
            if len(self.sent) > 1:
                raise OSError("gone")
            await super().send(message)

    async def work() -> None:
        connection = Broken([0])
        async with WriteCoalescer(connection.send, connection) as body:
            await body.put(b"first")
            body.put_now(b"second")
            while body.has_room:
                await asyncio.sleep(0.001)
            await body.put(b"third")

    with pytest.raises(OSError, match="gone"):
        asyncio.run(asyncio.wait_for(work(), 20))


class Reader:
    """Takes nothing until it `reads`."""

    congested = True

    def __init__(self) -> None:
        self.reads, self.read = asyncio.Event(), 0

    def abort(self) -> None:
        """It is what raised that ends it."""

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.read += len(message["body"])


def test_nobody_waits_for_a_reader_until_too_much_is_unread() -> None:
    put = 0

    async def work() -> None:
        reader = Reader()

        async def write() -> None:
            nonlocal put
            async with WriteCoalescer(reader.send, reader, max_unread_bytes=500) as body:
                for _ in range(1000):
                    await body.put(b"x")
                    put += 1

        writing = asyncio.ensure_future(write())
        while put < 500:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert put == 500
        reader.reads.set()
        await asyncio.wait_for(writing, 20)
        assert (put, reader.read) == (1000, 1000)

    asyncio.run(work())


def test_a_reader_who_takes_nothing_is_given_up() -> None:
    async def work() -> None:
        reader = Reader()
        async with WriteCoalescer(reader.send, reader, max_unread_bytes=500, max_wait_s=0.05) as body:
            for _ in range(1000):
                await body.put(b"x")

    with pytest.raises(ReaderTooSlow):
        asyncio.run(asyncio.wait_for(work(), 20))


def test_what_sending_raises_reaches_whoever_puts() -> None:
    async def send(_: Any) -> None:
        await asyncio.sleep(0)
        raise OSError("gone")

    async def work() -> None:
        async with WriteCoalescer(send) as body:
            while True:
                await body.put(b"x")
                await asyncio.sleep(0.001)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(asyncio.wait_for(work(), 20))
