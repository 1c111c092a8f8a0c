"""First seconds of a trial held against the whole loads of others: a trial that can no longer win is not measured on.

The first seconds have no warm-up and much noise. By how much whole loads are above them, and how reliably, is learned
from the trials that have both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.bench.tune.objective import COUNTED, TrialRecord

_LEAST = 2  # whole trials before one is stopped
_USUAL, _USUAL_COUNT = 0.06, 3  # spread that is assumed at first, and the trials that it weighs as much as
_BEHIND = 1.0  # spreads below the best, from which on a trial is stopped


@dataclass(frozen=True, slots=True)
class Race:
    """Forecast of a trial's worth from its first seconds. Worths are logarithms, more being better.

    Attributes:
        best: Worth of the best whole trial.
        above: Mean by which worths are above the logarithm of tokens a second in the first seconds.
        spread: Standard deviation of that.
        trials: Whole trials that it is learned from.
    """

    best: float
    above: float
    spread: float
    trials: int

    @classmethod
    def of(cls, trials: Iterable[tuple[float, float]]) -> Race | None:
        """Learn from whole trials; None without any.

        Args:
            trials: Tokens a second in the first seconds, and the worth of the whole trial.
        """
        pairs = [(worth, worth - math.log(first)) for first, worth in trials if first > 0]
        if not pairs:
            return None
        differences = [difference for _, difference in pairs]
        above = statistics.fmean(differences)
        squares = _USUAL_COUNT * _USUAL**2 + sum((difference - above) ** 2 for difference in differences)
        spread = math.sqrt(squares / (_USUAL_COUNT + len(pairs) - 1))
        return cls(max(worth for worth, _ in pairs), above, spread, len(pairs))

    def expected(self, first: float) -> float:
        """Forecast the worth of a trial with so many tokens a second in its first seconds, more than 0."""
        return math.log(first) + self.above

    def is_lost(self, first: float) -> bool:
        """Tell whether such a trial is behind the best by more than the noise."""
        return (
            first > 0 and self.trials >= _LEAST and self.expected(first) + _BEHIND * self.spread < self.best
        )


def spent(trials: Sequence[TrialRecord]) -> float:
    """Count trials by their time: one that was stopped is a part of one, by the median time of whole trials."""
    whole = [sum(trial.seconds.values()) for trial in trials if trial.outcome == "measured" and trial.seconds]
    usual_s = statistics.median(whole) if whole else 0.0
    return sum(
        min(1.0, sum(trial.seconds.values()) / usual_s)
        if trial.outcome == "stopped" and trial.seconds and usual_s
        else 1.0
        for trial in trials
        if trial.outcome in COUNTED
    )
