"""When entries were last used, noted until they are written together: a hit does not write."""

from __future__ import annotations

import threading


class Uses:
    """Safe to use from any number of threads."""

    def __init__(self, together: int) -> None:
        """`together`: how many are written at a time."""
        self._together = together
        self._noted: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def note(self, key: bytes, now: float) -> bool:
        """Whether they are to be written now."""
        with self._lock:
            self._noted[key] = now
            return len(self._noted) >= self._together

    def take(self) -> dict[bytes, float]:
        """What was noted since the last time: key -> s since the epoch."""
        with self._lock:
            noted, self._noted = self._noted, {}
            return noted
