"""Sees that a client has left, for many requests at once, with one thread.

Triton does not call back on a cancellation; it has to be asked, and each question is a trip to the server process.
The thread asks in rounds, and rests at least 20 times as long as a round took, so that asking stays under 5 % of a
core however many requests are open.

A request may not be asked about once its final flag is sent: Triton (2.51) has freed by then what the question needs,
and the whole server crashes. `WatchedSender` sees to that, and all responses go through it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_REST = 20  # times the length of a round


class WatchedSender:
    """Triton's response sender, made safe to use from several threads.

    It can be asked for a cancellation by another thread than the one that sends. And what is sent stays in memory until
    it is: Triton (2.51) drops outputs that the client did not ask for without holding Python's GIL. Were those the last
    references, arrays would be freed under the feet of other threads, which sooner or later corrupts the heap. Triton's
    sender is let go with the final flag: one that is freed after the model's end crashes the process, since the memory
    that it shares with the server is gone by then.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender  # None once the final flag is sent
        self._lock = threading.Lock()
        self.closed = False  # the final flag was sent, or is being sent

    def send(self, response: Any = None, *, flags: int = 0) -> None:
        """Send a response, or flags alone. Any flag is the final one."""
        if flags:
            with self._lock:  # waits for a question that is under way
                self.closed = True
        kept = None if response is None else response.output_tensors()
        self._sender.send(response, flags=flags)
        del kept
        if flags:
            self._sender = None

    def is_cancelled(self) -> bool:
        """Whether the client has left before its last response."""
        with self._lock:
            return not self.closed and self._sender.is_cancelled()


class CancellationWatch:
    """Calls `on_cancel` of a request, once, from a thread of its own, when the client has left."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._watched: list[tuple[WatchedSender, Callable[[], object]]] = []
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellations", daemon=True)
        self._thread.start()

    def watch(self, sender: WatchedSender, on_cancel: Callable[[], object]) -> None:
        """Watch a request until its last response."""
        with self._changed:
            self._watched.append((sender, on_cancel))
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._closed.is_set())
                if self._closed.is_set():
                    return
                open_ones = [(sender, call) for sender, call in self._watched if not sender.closed]
                self._watched = []
            start = time.monotonic()
            for sender, on_cancel in open_ones:
                if sender.is_cancelled():
                    on_cancel()
                else:
                    self.watch(sender, on_cancel)
            self._closed.wait(max(self._period_s, _REST * (time.monotonic() - start)))
