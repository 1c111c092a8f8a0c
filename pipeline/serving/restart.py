"""When a process that failed is started again, and when that is given up. Pure; the supervisor keeps the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A limit on failures within a window of time, and pauses that double.

    Attributes:
        max_restarts: Restarts within the window; the failure after them is final.
        window_s: Failures that are older do not count any more, in seconds.
        pause_s: Pause before the second restart within the window; the first is made at once.
        max_pause_s: Longest pause.

    >>> [RestartPolicy(max_restarts=3).pause_before_restart(range(n), now=4) for n in range(1, 5)]
    [0.0, 1.0, 2.0, None]
    """

    max_restarts: int = 5
    window_s: float = 300.0
    pause_s: float = 1.0
    max_pause_s: float = 30.0

    def pause_before_restart(self, failures: Sequence[float], now: float) -> float | None:
        """Decide what follows a failure.

        Args:
            failures: Times of all failures so far, the one that has just happened among them, in seconds.
            now: By the same clock.

        Returns:
            Seconds to wait before the restart; None to give up.
        """
        recent = sum(now - failure < self.window_s for failure in failures)
        if recent > self.max_restarts:
            return None
        if recent < 2:
            return 0.0
        # Doubling stops long before it could overflow.
        return min(self.max_pause_s, self.pause_s * 2.0 ** min(recent - 2, 64))
