"""Awaiting a message of grpc.aio in a task that may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import grpc


class CancellableRead:
    """Awaits the next message of a call. A cancellation has the call end, and is raised when the read has ended.

    Were the read itself cancelled, grpc.aio would never free what it reads into: 1 KiB and more, each time that a task
    is cancelled in a stream (grpc/grpc#43360, seen with 1.85). So it stands between the task and the future that the
    read waits for: it is a future as asyncio's tasks take it (`asyncio.isfuture`), but a cancellation goes no further.
    """

    __slots__ = ("_asyncio_future_blocking", "_call", "_cancelled", "_end_call", "_future")

    def __init__(self, call: Any, end_call: Callable[[], object]) -> None:
        self._call, self._end_call, self._cancelled = call, end_call, False

    def __await__(self) -> Generator[Any, None, Any]:
        steps = self._call.read()
        try:
            self._future = steps.send(None)
            while True:
                # As a task does with a future that it waits for itself.
                self._future._asyncio_future_blocking = False
                self._asyncio_future_blocking = True
                try:
                    yield self
                except Exception as error:
                    self._future = steps.throw(error)
                else:
                    self._future = steps.send(None)
        except StopIteration as ended:
            message = ended.value
        except grpc.RpcError:
            if not self._cancelled:
                raise
        finally:
            steps.close()
        if self._cancelled:
            raise asyncio.CancelledError
        return message

    def get_loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = self._future.get_loop()
        return loop

    def add_done_callback(self, callback: Any, *, context: Any = None) -> None:
        self._future.add_done_callback(callback, context=context)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        self._cancelled = True
        self._end_call()
        return True
