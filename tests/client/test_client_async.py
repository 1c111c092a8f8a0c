"""Cases that only the asyncio client meets: tasks that are cancelled, a busy loop, many streams in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import grpc
import pytest

from pipeline.client import (
    AsyncClient,
    Cancelled,
    ClientError,
    Retries,
    Timeouts,
)
from pipeline.client.testing import Ending, FakeServer, Received, Reply

SERVER = """
import sys
from pipeline.client.testing import FakeServer, Reply
with FakeServer(Reply(["a"] * 24)) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_200_streams_share_a_connection() -> None:
    def script(received: Received) -> Reply:
        return Reply([f"{received.prompt}:{index} " for index in range(10)], first_delay_s=0.5, delay_s=0.01)

    async def work(server: FakeServer) -> None:
        async with AsyncClient(server.url) as client:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(client.generate(f"s{number}", max_tokens=100)) for number in range(200)
                ]
            for number, task in enumerate(tasks):
                assert task.result().text == "".join(f"s{number}:{index} " for index in range(10))

    with FakeServer(script) as server:
        run(work(server))
        assert len({request.request_id for request in server.requests}) == 200


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def native_bytes() -> int:
    """What has been allocated outside of Python's own memory, by glibc."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo
    return int(libc.mallinfo2().uordblks)


def test_tasks_that_are_cancelled_in_a_stream_leave_no_memory_behind() -> None:
    async def call(client: AsyncClient) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async with client.stream("Hi", max_tokens=1000) as stream:
                async for _ in stream:
                    begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def work(port: int) -> None:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            for _ in range(100):
                await call(client)
            before = native_bytes()
            for _ in range(300):
                await call(client)
            assert native_bytes() - before < 150 * 2**10, "grpc.aio itself keeps more than 1 KiB of each"

    # In a process of its own: one in this process would allocate, too.
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            run(work(int(server.stdout.readline())))
        finally:
            server.stdin.close()


def test_a_task_that_is_cancelled_as_it_leaves_the_block() -> None:
    async def leave(client: AsyncClient) -> None:
        async with client.stream("Hi", max_tokens=8) as stream:
            [chunk async for chunk in stream]
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    async def work(server: FakeServer) -> None:
        async with AsyncClient(server.url) as client:
            for _ in range(10):
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.create_task(leave(client))
            assert [endpoint.outstanding for endpoint in client._pool.all] == [0]

    with FakeServer(Reply(ending=Ending.MARKED)) as server:
        run(work(server))


def test_an_answer_whose_task_is_cancelled_ends_in_order() -> None:
    """A cancelled call can end Triton 24.10; so the server is asked to end the answer, and the call ends by itself."""

    async def work(server: FakeServer) -> None:
        async with AsyncClient(server.url) as client:
            stream, begun = client.stream("Hi", max_tokens=8), asyncio.Event()

            async def read() -> None:
                async with stream:
                    async for _ in stream:
                        begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.requests[0].stopped.is_set()
            assert await stream._call.code() is grpc.StatusCode.OK
            assert len(server.requests) == 1

    with FakeServer(Reply(["a"] * 1000, delay_s=0.01)) as server:
        run(work(server))


def test_a_cancellation_that_meets_the_final_response() -> None:
    async def work(server: FakeServer) -> None:
        async with AsyncClient(server.url) as client, client.stream("Hi", max_tokens=8) as stream:
            await anext(stream)
            await asyncio.to_thread(server.requests[0].finished.wait, 5)
            reads = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            time.sleep(0.2)  # the response comes, and the loop cannot see it
            stream.cancel()
            # Whether it is the end of the answer, or the server's to our asking it to stop, cannot be told.
            with pytest.raises(Cancelled):
                await reads

    with FakeServer(Reply(["a"])) as server:
        run(work(server))


def test_no_tasks_are_left_however_a_stream_ends() -> None:
    async def work(server: FakeServer) -> None:
        timeouts, before = Timeouts(between_tokens_s=0.2), asyncio.all_tasks()
        async with AsyncClient(server.url, timeouts=timeouts, retries=Retries(attempts=1)) as client:

            async def read(ending: str) -> None:
                with contextlib.suppress(ClientError):
                    await client.generate(ending, max_tokens=8)

            async def leave(ending: str) -> None:
                async with client.stream(ending, max_tokens=8) as stream:
                    await anext(stream)

            await asyncio.gather(
                *(behaviour(ending.name) for behaviour in (read, leave) for ending in Ending)
            )
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0.01)

    with FakeServer(lambda received: Reply(ending=Ending[received.prompt])) as server:
        run(work(server))


def test_long_messages_come_and_who_does_not_read_holds_the_server_back() -> None:
    chunks = ["x" * 5 * 2**20, *(["y" * 2**20] * 16)]

    async def work(server: FakeServer) -> None:
        async with AsyncClient(server.url) as client, client.stream("Hi", max_tokens=99) as stream:
            await anext(stream)
            await asyncio.sleep(0.5)
            assert not server.requests[0].finished.is_set()
            async for _ in stream:
                pass
            assert stream.text == "".join(chunks)

    with FakeServer(Reply(chunks)) as server:
        run(work(server))
