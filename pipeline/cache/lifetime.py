"""How long an answer may be served: a day, or ten minutes if it depends on when or by whom it is asked.

An age is absolute: it runs from when the answer was given, however often it is served. What a question is about is told
by patterns, searched in its last turn without regard to case; a request may also say it itself (`ttl_s=`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

STATIC_S, DYNAMIC_S = 86_400.0, 600.0
_OFFICES = (
    "president|vice president|prime minister|chancellor|king|queen|pope|governor|mayor|senator|minister|ceo|cfo|cto|"
    "chair(man|woman|person)?|head|leader|owner|coach|captain|champion|(record|title) holder|richest|world number one"
)
# What depends on when it is asked, or on who asks.
DYNAMIC_WHEN = (
    # words of time
    r"\b(now|today|tonight|tomorrow|yesterday|current(ly)?|latest|newest|recent(ly)?|nowadays|these days|at the moment|"
    r"so far|yet)\b",
    r"\b(this|last|next|past|coming|upcoming) (hour|morning|afternoon|evening|night|day|week|weekend|month|quarter|"
    r"season|semester|year|(mon|tues|wednes|thurs|fri|satur|sun)day)s?\b",
    # what comes next, and what changes
    r"\b(next|first|last|upcoming) (train|bus|flight|ferry|tram|plane|boat|game|match|race|fight|concert|show|episode|"
    r"election|meeting|appointment|payment|bill|holiday|release|eclipse|full moon|launch)s?\b",
    r"\b(weather|forecast|traffic|news|headlines?|scores?|standings|prices?|in stock|stock market|market cap|"
    r"box office|(share|stock|exchange|interest|mortgage|inflation|unemployment) rates?|(share|stock) quotes?)\b",
    r"\bwhat (time|day|date) is it\b|\b(is|are|am|was|were) .{0,40}\b(open|closed|available|down|delayed|shipped)\b",
    # who holds an office
    rf"\bwho('s| is| are)( the| our| my| your)?( \w+){{0,3}} ({_OFFICES})\b",
    # what is somebody's own
    r"\b(what|where|when|who|which)('s| is| are| was| were| does| do| did| will| has| have) (my|our)\b",
    r"\b(has|have|had|hasn't|haven't|did|didn't|does|is|isn't|are|was|were|will) (my|our) \w+",
    r"\bhow (much|many)\b.{0,30}\b(my|our)\b|\b(do|did|have) i (owe|earn|spend|order|paid|book)\b",
    r"\bwhere('s| is| are) the (order|parcel|package|delivery|shipment|refund|flight|train)s?\b",
    r"^\W*((track|check|show|list|read|view|see|get|find|tell)( me)? )?(my|our) \w+( \w+)?\W*$",
    # the same in German, French and Spanish
    r"\b(jetzt|heute|morgen|gestern|aktuell\w*|derzeit|nächste[nrs]?|maintenant|aujourd'hui|demain|actuel\w*|"
    r"prochaine?|ahora|hoy|mañana|ayer|actualmente|próxim[oa])\b",
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
        return min(self.static_s, self.dynamic_s) if self.is_dynamic(turn) else self.static_s

    def is_dynamic(self, turn: str) -> bool:
        """Whether the answer to a question depends on when it is asked, or on who asks."""
        return any(pattern.search(turn) for pattern in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.dynamic_when)
