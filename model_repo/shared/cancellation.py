"""Sees that a client has left, for many requests at once, with one thread.

Triton does not call back on a cancellation; it has to be asked, and each question is a trip to the server process.
The thread asks in rounds, and rests at least 20 times as long as a round took, so that asking stays under 5 % of a
core however many requests are open.

A request may not be asked about once its final flag is sent: Triton (2.51) has freed what the question needs, and the
whole server crashes. So `release` comes first; it waits for a question that is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

_REST = 20  # times the length of a round


class Sender(Protocol):
    """What of Triton's response sender is used here."""

    def is_cancelled(self) -> bool:
        """Whether the client has left."""


class Watched:
    """One request that is being watched."""

    def __init__(self, sender: Sender, on_cancel: Callable[[], None]) -> None:
        self._sender = sender
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self.released = False

    def release(self) -> None:
        """Ask no more about this request. Must be called before its final flag is sent."""
        with self._lock:
            self.released = True

    def ask(self) -> None:
        """Call `on_cancel`, once, if the client has left."""
        with self._lock:
            if self.released or not self._sender.is_cancelled():
                return
            self.released = True
        self._on_cancel()


class CancellationWatch:
    """Calls `on_cancel` of a request from a thread of its own when the client has left."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._watched: list[Watched] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cancellations", daemon=True)
        self._thread.start()

    def watch(self, sender: Sender, on_cancel: Callable[[], None]) -> Watched:
        """Watch a request until it is released."""
        watched = Watched(sender, on_cancel)
        with self._changed:
            self._watched.append(watched)
            self._changed.notify()
        return watched

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._closed)
                if self._closed:
                    return
                self._watched = [watched for watched in self._watched if not watched.released]
                round = list(self._watched)
            start = time.monotonic()
            for watched in round:
                watched.ask()
            time.sleep(max(self._period_s, _REST * (time.monotonic() - start)))
