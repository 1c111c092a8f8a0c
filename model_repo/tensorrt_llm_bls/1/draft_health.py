"""What became of the calls of a draft model, over all requests: no failure of it is one of a request."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

_PAUSE_S = 5.0  # after the draft could not be reached
_MOST_REASONS = 100  # that are remembered as said


class DraftHealth:
    """Says each reason once, and keeps requests from a draft that cannot be reached. Safe to use from any thread.

    >>> health = DraftHealth(print)
    >>> health.failed(ValueError("row 1 is too long"))
    the draft model failed, the target goes on alone: row 1 is too long
    >>> health.failed(ValueError("row 2 is too long"))
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._down_until_s = 0.0
        self._lock = threading.Lock()

    def is_up(self) -> bool:
        """Whether the draft is worth a call."""
        return time.monotonic() >= self._down_until_s

    def failed(self, error: Exception) -> None:
        """A call of the draft failed, and its request goes on without it."""
        text = " ".join(str(error).split()) or type(error).__name__
        reason = re.sub(r"\d+", "0", text)  # numbers differ between requests
        with self._lock:
            if isinstance(error, ConnectionError):
                self._down_until_s = time.monotonic() + _PAUSE_S
            known = reason in self._said or len(self._said) >= _MOST_REASONS
            self._said.add(reason)
        if not known:
            self._say(f"the draft model failed, the target goes on alone: {text}")
