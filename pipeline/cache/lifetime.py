"""How long an answer may be served: a day, or ten minutes if the question is about something that changes.

An age is absolute: it runs from when the answer was given, however often it is served. What a question is about is told
by patterns, searched in its last turn without regard to case; a request may also say it itself (`ttl_s=`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

STATIC_S, DYNAMIC_S = 86_400.0, 600.0
# What depends on when it is asked.
DYNAMIC_WHEN = (
    r"\b(now|today|tonight|tomorrow|yesterday|current(ly)?|latest|newest|recent(ly)?|at the moment|so far|yet)\b",
    r"\b(this|last|next) (hour|morning|evening|week|weekend|month|quarter|season|year)\b",
    r"\b(weather|forecast|traffic|news|headlines?|scores?|(stock|share|exchange) (prices?|rates?)|in stock)\b",
    r"\bwhat (time|day|date) is it\b|\b(is|are|am|was|were) .{0,40}\b(open|closed|available|down|delayed|shipped)\b",
    r"\bwhere('s| is| are) (my|our|the) (order|parcel|package|delivery|shipment|refund|flight|train)s?\b",
)


@dataclass(frozen=True)
class Lifetime:
    """
    >>> lifetime = Lifetime()
    >>> lifetime.of("What is the capital of France?"), lifetime.of("Is it open today?")
    (86400.0, 600.0)
    """

    static_s: float = STATIC_S
    dynamic_s: float = DYNAMIC_S
    dynamic_when: Sequence[str] = DYNAMIC_WHEN  # regular expressions; none: everything is static

    def __post_init__(self) -> None:
        """Raises ValueError that names every malformed pattern, and every time that is not above 0."""
        faults = [
            f"{seconds:g} s is not above 0" for seconds in (self.static_s, self.dynamic_s) if not seconds > 0
        ]
        for pattern in self.dynamic_when:
            try:
                re.compile(pattern)
            except re.error as error:
                faults.append(f"{pattern!r} is not a regular expression: {error}")
        if faults:
            raise ValueError("; ".join(faults))

    def of(self, turn: str) -> float:
        """Return the seconds for which the answer to a question may be served; for a dynamic one the shorter time."""
        dynamic = any(pattern.search(turn) for pattern in self._patterns)
        return min(self.static_s, self.dynamic_s) if dynamic else self.static_s

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.dynamic_when)
