"""Whether drafting pays, decided by measuring tokens a second with and without it.

What a draft model gains depends on the batch size, the machine and the text. So for each batch size (to a power of two)
both ways are tried, the faster one is kept, and the other is tried again now and then, ever less often while
it keeps losing. The answers do not depend on it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from statistics import median

_TRIAL_STEPS = 8
_WORTH = 1.1  # drafting must be faster by this factor, because its longer steps keep newcomers waiting
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 8192  # steps between trials of the slower way


class Mode(Enum):
    PLAIN = "plain"
    TRIAL = "trial"  # draft if the draft model has little to catch up with
    DRAFT = "draft"


class Pace:
    def __init__(self) -> None:
        self._contests: dict[int, _Contest] = {}  # by bit length of the batch size

    def mode(self, batch: int) -> Mode:
        contest = self._contest(batch)
        if not contest.drafting:
            return Mode.PLAIN
        return Mode.TRIAL if contest.on_trial else Mode.DRAFT

    def record(self, batch: int, *, drafted: bool, tokens: int, seconds: float) -> None:
        """One step in which all `batch` sequences decoded."""
        self._contest(batch).record(drafted, tokens / seconds)

    def _contest(self, batch: int) -> _Contest:
        return self._contests.setdefault(batch.bit_length(), _Contest())


class _Contest:
    def __init__(self) -> None:
        self.drafting = True  # the way of the current phase
        self.on_trial = True
        self._steps_left = _TRIAL_STEPS  # of the current phase
        self._pause = _FIRST_PAUSE
        self._rates: dict[bool, deque[float]] = {}  # drafting -> tokens a second of the last steps

    def record(self, drafted: bool, rate: float) -> None:
        self._rates.setdefault(drafted, deque(maxlen=2 * _TRIAL_STEPS)).append(rate)
        if drafted is not self.drafting:  # a trial that has to wait until it is cheap
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self._next_phase()

    def _next_phase(self) -> None:
        if not self.on_trial or len(self._rates) < 2:
            self.drafting, self.on_trial, self._steps_left = not self.drafting, True, _TRIAL_STEPS
            return
        best = median(self._rates[True]) > _WORTH * median(self._rates[False])
        self._pause = _FIRST_PAUSE if best is self.drafting else min(2 * self._pause, _LONGEST_PAUSE)
        self.drafting, self.on_trial, self._steps_left = best, False, self._pause
