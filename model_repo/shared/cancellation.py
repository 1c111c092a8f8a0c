"""Sees that a client has left, for many requests at once, with one thread.

Triton does not call back on a cancellation; it has to be asked, and each question is a trip to the server process.
The thread asks in rounds, and rests at least 20 times as long as a round took, so that asking stays under 5 % of a
core however many requests are open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_REST = 20  # times the length of a round


class Sender(Protocol):
    """What of Triton's response sender is used here."""

    def is_cancelled(self) -> bool:
        """Whether the client has left."""


class CancellationWatch:
    """Calls `on_cancel` once, from its own thread, when the client of a watched request has left."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._watched: dict[int, tuple[Sender, Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._next_key = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cancellations", daemon=True)
        self._thread.start()

    def add(self, sender: Sender, on_cancel: Callable[[], None]) -> int:
        """Watch a request; the key that `remove` takes."""
        with self._changed:
            self._next_key += 1
            self._watched[self._next_key] = (sender, on_cancel)
            self._changed.notify()
            return self._next_key

    def remove(self, key: int) -> None:
        """Watch it no longer."""
        with self._changed:
            self._watched.pop(key, None)

    @contextmanager
    def watching(self, sender: Sender, on_cancel: Callable[[], None]) -> Iterator[None]:
        """Watch a request for the length of the `with` block."""
        key = self.add(sender, on_cancel)
        try:
            yield
        finally:
            self.remove(key)

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
                watched = list(self._watched.items())
            start = time.monotonic()
            for key, (sender, on_cancel) in watched:
                if sender.is_cancelled():
                    self.remove(key)
                    on_cancel()
            time.sleep(max(self._period_s, _REST * (time.monotonic() - start)))
