"""Deadlines of blocking reads: one thread for all streams of a client.

A blocking gRPC read has no deadline of its own. Each stream says before it reads until when it will wait; the watchdog
breaks the read of those that are late.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

_LINGER_S = 5.0  # how long the thread waits for the next stream before it ends


class Watched(Protocol):
    """Something that waits."""

    waits_until: float  # time.monotonic(), or infinity

    def too_late(self) -> None:
        """Break the wait; called on the watchdog's thread."""


class Watchdog:
    """`watch` a stream, `arm` it before each read, `disarm` it after, `forget` it at its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf

    def watch(self, stream: Watched) -> None:
        with self._changed:
            self._watched.add(stream)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pipeline-client-deadlines", daemon=True
                )
                self._thread.start()

    def forget(self, stream: Watched) -> None:
        with self._changed:
            self._watched.discard(stream)

    def arm(self, stream: Watched, within_s: float | None) -> None:
        if within_s is None:
            return
        with self._changed:
            stream.waits_until = time.monotonic() + within_s
            if stream.waits_until < self._wakes_at:
                self._changed.notify()

    def disarm(self, stream: Watched) -> None:
        stream.waits_until = math.inf

    def _run(self) -> None:
        with self._changed:
            idle_since = time.monotonic()
            while True:
                now = time.monotonic()
                late = [stream for stream in self._watched if stream.waits_until <= now]
                for stream in late:
                    stream.waits_until = math.inf
                    stream.too_late()
                if self._watched:
                    idle_since = now
                elif now - idle_since >= _LINGER_S:
                    self._thread = None
                    return
                soonest = min((stream.waits_until for stream in self._watched), default=now + _LINGER_S)
                self._wakes_at = min(soonest, now + _LINGER_S)
                self._changed.wait(max(0.0, self._wakes_at - time.monotonic()))
