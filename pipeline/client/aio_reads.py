"""Reading a call of `grpc.aio`: messages are taken as they come, and a task is woken for those that it has to see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import grpc


class MessageReads:
    """Awaits the next message of a call that `take` does not take.

    To take a message in the event loop costs less than to wake a task for it, with all that waits for the task. So one
    wait lasts as long as messages are taken.

    A cancellation has the call end, and is raised when the read has ended. Were the read itself cancelled, grpc.aio
    would never free what it reads into: 1 KiB and more, each time that a task is cancelled in a stream
    (grpc/grpc#43360, seen with 1.85). So this stands between the task and the future that the read waits for: it is a
    future as asyncio's tasks take it (`asyncio.isfuture`), but a cancellation goes no further.
    """

    __slots__ = (
        "_asyncio_future_blocking", "_call", "_cancelled", "_context", "_end_call", "_error", "_loop", "_message",
        "_steps", "_take", "_wake",
    )  # fmt: skip

    def __init__(
        self,
        call: Any,
        end_call: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Any], bool],
    ) -> None:
        """
        Args:
            call: A call of grpc.aio whose responses are read one by one.
            end_call: Called when the wait is cancelled.
            loop: The running event loop.
            take: Called with each message and with `grpc.aio.EOF`; whether it wants the next, too. What it raises, the
                wait raises. After a cancellation it is called no more.
        """
        self._call, self._end_call, self._loop, self._take = call, end_call, loop, take
        self._cancelled = False
        # Of the task, while it waits.
        self._wake: Callable[[object], None] | None = None
        self._context: Any = None
        self._error: BaseException | None = None
        self._message: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        self._steps = self._call.read()
        try:
            if not self._advance():
                self._asyncio_future_blocking = True
                yield self
        finally:
            self._wake = None
            self._steps.close()
        error = self._error
        if error is not None and not (self._cancelled and isinstance(error, grpc.RpcError)):
            try:
                raise error
            finally:
                # No circle of the error, its traceback and this.
                error = self._error = None
        if self._cancelled:
            raise asyncio.CancelledError
        return self._message

    def _advance(self) -> bool:
        """Read until a message is not there yet; whether the wait is over."""
        try:
            while (message := self._read(self._steps)) is not _WAITS:
                if self._cancelled or not self._take(message):
                    self._message = message
                    return True
                self._steps = self._call.read()
        except BaseException as error:
            self._error = error
            return True
        return False

    def _read(self, steps: Any) -> Any:
        """Take a step of a read; its message, once that has come."""
        try:
            future = steps.send(None)
        except StopIteration as ended:
            return ended.value
        # As a task does with a future that it waits for itself.
        future._asyncio_future_blocking = False
        future.add_done_callback(self._go_on)
        return _WAITS

    def _go_on(self, _: object) -> None:
        wake = self._wake
        # None: nobody waits any longer.
        if wake is not None and self._advance():
            self._loop.call_soon(wake, self, context=self._context)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the task that waits; this and the next are called by the task."""
        return self._loop

    def add_done_callback(self, callback: Any, *, context: Any = None) -> None:
        """Say what wakes the task."""
        self._wake, self._context = callback, context

    def result(self) -> None:
        """Raise nothing: `__await__` does."""

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        """Have the call end. The task is woken when it has."""
        self._cancelled = True
        self._end_call()
        return True


_WAITS = object()
