"""Leaving a server alone that does not answer: after a failure nobody asks it for a while, then one request tries.

Without this every request would wait for the same timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.cache.backend import BackendDown

_FIRST_S = 0.5
_LONGEST_S = 15.0


class ServerUnreachable(BackendDown):
    """The server could not be reached, or took too long."""


class CircuitBreaker:
    """Safe to use from any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._until = 0.0
        self._why = ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Ask the server in here. Raises BackendDown at once while it rests; Unanswered in here begins a rest."""
        if self._failures:
            self._take_turn()
        try:
            yield
        except ServerUnreachable as error:
            with self._lock:
                self._failures += 1
                self._why = str(error)
                self._until = self._clock() + self._length()
            raise
        except BackendDown:  # it refused, and so it is there
            self._failures = 0
            raise
        self._failures = 0

    def _take_turn(self) -> None:
        """One of those who wait may try when the rest is over; the others wait for what it finds."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                raise BackendDown(f"{self._why}; asked again in {self._until - now:.1f} s")
            self._until = now + self._length()

    def _length(self) -> float:
        return float(min(_FIRST_S * 2 ** max(0, self._failures - 1), _LONGEST_S))
