"""Standard output and standard error of processes that serve: what cannot be written is dropped.

A full disk, a closed pipe or a terminal that is gone lets a write fail, and a reader that has stopped lets it wait for
ever. Neither may end or hold up a process that answers requests. What is written later goes out when it can again.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from select import PIPE_BUF
from typing import Any, TextIO

# A reader is waited for so long, and then no more until it has read something.
_READER_S = 0.2


class DroppingFile(io.RawIOBase):
    """Writes to a file, pipe or terminal that is open already, and never fails."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` stays open."""
        self._descriptor = descriptor
        self._reader_is_late = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Write some of it, or drop all of it. Returns how many bytes are done with."""
        text = memoryview(data)
        with suppress(OSError):
            if self._takes_some():
                # A pipe that takes anything takes so much without waiting.
                return os.write(self._descriptor, text[:PIPE_BUF])
        return text.nbytes

    def _takes_some(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        self._reader_is_late = not poll.poll(0 if self._reader_is_late else _READER_S * 1000)
        return not self._reader_is_late


def drop_unwritable_output() -> None:
    """Let no write to standard output or standard error fail or wait in this process from now on.

    To be called before log handlers and reporters take the streams. Streams that something else has replaced, such as a
    test, stay.
    """
    # None where a descriptor was closed before the start.
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _dropping(sys.__stdout__)
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _dropping(sys.__stderr__)


def _dropping(stream: TextIO) -> io.TextIOWrapper:
    with suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(DroppingFile(stream.fileno()))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
