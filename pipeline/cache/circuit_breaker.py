"""A circuit breaker for a server that does not answer: after a failure no request asks it for a while, then one tries.

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
    """Open for 0.5 s after the first failure, twice as long after each further one, 15 s at most; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Failures in a row.
        self._failures = 0
        self._until = 0.0
        self._why = ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a request to the server.

        Raises:
            BackendDown: at once while the breaker is open. A ServerUnreachable that the block raises opens it.
        """
        # Requests that are under way together all fail: they count as one.
        trial = self._failures > 0
        if trial:
            # One request tries when the pause is over; the others are refused until it has an answer.
            with self._lock:
                now = self._clock()
                if now < self._until:
                    raise BackendDown(f"{self._why}; asked again in {self._until - now:.1f} s")
                self._until = now + self._length()
        try:
            yield
        except ServerUnreachable as error:
            with self._lock:
                if trial or self._clock() >= self._until:
                    self._failures += 1
                    self._why = str(error)
                    self._until = self._clock() + self._length()
            raise
        except Exception:
            # The server refused, or the block failed after its answer: it is there.
            self._close()
            raise
        self._close()

    def _close(self) -> None:
        self._failures, self._until = 0, 0.0

    def _length(self) -> float:
        return float(min(_FIRST_S * 2 ** max(0, self._failures - 1), _LONGEST_S))
