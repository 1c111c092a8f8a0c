"""When a process that failed is started again. Pure; the supervisor keeps the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A limit on failures within a window of time, and pauses that double.

    Attributes:
        max_restarts: Restarts within the window; a process that fails more often counts as failing.
        window_s: Failures that are older do not count any more, in seconds.
        pause_s: Pause before the second restart within the window; the first is made at once.
        max_pause_s: Longest pause.
        max_failing_pause_s: Longest pause between two tries to start a process that is failing.
        gives_up: Whether a process that is failing is not tried again, because something above starts all anew.

    >>> policy = RestartPolicy(max_restarts=3)
    >>> [policy.pause_before_restart(range(n), now=4) for n in range(1, 5)]
    [0.0, 1.0, 2.0, 4.0]
    >>> [policy.too_often(range(n), now=4) for n in range(1, 5)]
    [False, False, False, True]
    """

    max_restarts: int = 5
    window_s: float = 300.0
    pause_s: float = 1.0
    max_pause_s: float = 30.0
    max_failing_pause_s: float = 60.0
    gives_up: bool = False

    def too_often(self, failures: Sequence[float], now: float) -> bool:
        """Decide whether a process counts as failing.

        Args:
            failures: Times of all failures so far, the one that has just happened among them, in seconds.
            now: By the same clock.
        """
        return self._recent(failures, now) > self.max_restarts

    def pause_before_restart(self, failures: Sequence[float], now: float) -> float:
        """Return the seconds to wait before the restart that follows a failure; see `too_often`."""
        recent = self._recent(failures, now)
        return 0.0 if recent < 2 else min(self.max_pause_s, _doubled(self.pause_s, recent - 2))

    def pause_while_failing(self, tries: int) -> float:
        """Return the seconds to wait before a process that is failing is tried again.

        Args:
            tries: How often that was done since it was ready.
        """
        return min(self.max_failing_pause_s, _doubled(self.max_pause_s, tries))

    def _recent(self, failures: Sequence[float], now: float) -> int:
        return sum(now - failure < self.window_s for failure in failures)


def _doubled(seconds: float, times: int) -> float:
    """Double so often, but never so often that it overflows."""
    return seconds * 2.0 ** min(times, 64)
