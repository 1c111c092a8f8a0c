"""Choosing the setting that serves most within a budget of wrong hits, and promising no more than the pairs can show.

Of many settings that are tried on the same pairs, the best looks better than it is. So one half of the pairs chooses
verifier, guards and floor, and the other half alone says how far the score may be lowered: from the strictest threshold
down, as long as the exact bound on the share of traps served is within the budget. Thresholds that are tested in a
fixed order, up to the first that fails, need no correction for their number (learn then test: A. Angelopoulos and
others, arXiv:2110.01052), so what is shown holds with the confidence that is stated, for pairs like these. With too few
pairs for two halves, only the score is chosen, by all of them. With too few for that, nothing is promised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.tuning.measuring import (
    FLOORS,
    SCORES,
    Measured,
    PairOutcome,
    Rows,
    Setting,
    pairs_needed,
)
from pipeline.cache.tuning.pairs import question_groups

Basis = Literal["interval", "rate", "fewest"]
# Traps in which a guard must have found something before it can be judged whether it may be left out.
_MIN_TRAPS = 30


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """A setting for the recipe, and the evidence for it.

    Attributes:
        budget: share of the traps that may be served.
        confidence: of what is shown.
        outcome: on all pairs.
        shown: on the pairs that show it: the other half, or all of them where only the score was chosen.
        basis: what is within the budget: the bound that is shown ("interval"), the observed rate only, or nothing.
        halved: whether one half chose and the other shows.
        can_show: the smallest budget that these pairs could show with some pair served; None if none.
        traps_needed: traps, none of them served, that would show the budget.
    """

    budget: float
    confidence: float
    outcome: PairOutcome
    shown: PairOutcome
    basis: Basis
    halved: bool
    can_show: float | None
    traps_needed: int

    @property
    def setting(self) -> Setting:
        """The dials."""
        return self.outcome.setting

    @property
    def meets_budget(self) -> bool:
        """Whether the pairs show that the budget is kept."""
        return self.basis == "interval"


def choose(
    measured: Measured, start: Setting, *, budget: float, confidence: float = 0.95, all_dials: bool = True
) -> TunedSetting:
    """Choose the setting of most recall of which the pairs show that it keeps the budget.

    If no threshold shows that, the observed rate decides; if that is beyond the budget too, the fewest wrong hits do.

    Args:
        measured: the labelled pairs.
        start: the dials as the recipe has them.
        budget: share of the traps that may be served.
        confidence: of what is shown.
        all_dials: verifier, guards and floor may be changed, too, where there are enough pairs for two halves.
    """
    needed = pairs_needed(budget, confidence)
    everything = np.ones(len(measured.pairs), np.bool_)
    showing = _half(measured)
    halved = all_dials and int((showing & ~measured.same).sum()) >= needed
    chosen = _best(measured, start, ~showing, budget) if halved else start
    rows = showing if halved else everything
    shown, can_show = _lowest_shown(measured, chosen, rows, budget, confidence)
    if shown is not None:
        basis: Basis = "interval"
        setting = shown.setting
    else:
        setting, basis = _by_rate(measured, chosen, budget)
    return TunedSetting(
        budget=budget,
        confidence=confidence,
        outcome=measured.outcome(setting),
        shown=measured.outcome(setting, rows),
        basis=basis,
        halved=halved,
        can_show=can_show,
        traps_needed=needed,
    )


def _lowest_shown(
    measured: Measured, chosen: Setting, rows: Rows, budget: float, confidence: float
) -> tuple[PairOutcome | None, float | None]:
    """The outcome at the lowest threshold that is shown to keep the budget, and the smallest budget that could be."""
    best, can_show = None, None
    for score in reversed(SCORES):
        outcome = measured.outcome(replace(chosen, min_score=score), rows)
        if not outcome.recall.count:
            continue
        bound = outcome.false.bound(confidence)
        can_show = bound if can_show is None else can_show
        if bound > budget:
            break
        best = outcome
    return best, can_show


def _by_rate(measured: Measured, chosen: Setting, budget: float) -> tuple[Setting, Basis]:
    """Of thresholds that serve the same, the highest."""
    outcomes = [measured.outcome(replace(chosen, min_score=score)) for score in SCORES]
    within = [outcome for outcome in outcomes if outcome.false.value <= budget]
    basis: Basis = "rate" if within else "fewest"
    fewest = min(outcome.false.count for outcome in outcomes)
    best = max(
        within or [outcome for outcome in outcomes if outcome.false.count == fewest],
        key=lambda outcome: (outcome.recall.count, outcome.setting.min_score),
    )
    return best.setting, basis


def _best(measured: Measured, start: Setting, rows: Rows, budget: float) -> Setting:
    """The setting that serves most of some pairs within the budget, by the rate that is observed there."""
    tried = []
    for verifier in measured.scores:
        best = _best_levels(measured, replace(start, verifier=verifier), rows, budget)
        while True:
            fewer = [
                _best_levels(
                    measured,
                    replace(best[2], guards=tuple(one for one in best[2].guards if one != name)),
                    rows,
                    budget,
                )
                for name in best[2].guards
                if _known(measured, rows, name)
            ]
            # A guard goes only where more is served and no more of it wrongly.
            better = [found for found in fewer if found[0] > best[0] and found[1] <= best[1]]
            if not better:
                break
            best = max(better, key=lambda found: found[0])
        tried.append(best)
    return max(tried, key=lambda found: found[0])[2]


def _best_levels(measured: Measured, setting: Setting, rows: Rows, budget: float) -> tuple[int, int, Setting]:
    """Floor and threshold that serve most within the budget: true pairs, traps, and the setting.

    Of settings that serve the same, the strictest.
    """
    allowed = measured.unforbidden(setting.guards) & rows
    scores, same = measured.scores[setting.verifier], measured.same
    traps = int((rows & ~same).sum())
    best = (-1, 0, setting)
    for floor in sorted({*FLOORS, setting.min_similarity}):
        near = allowed & (measured.cosines >= floor)
        right, wrong = (_reaching(scores[near & label]) for label in (same, ~same))
        for score, true, false in zip(SCORES, right, wrong, strict=True):
            if false <= budget * traps and true >= best[0]:
                best = (true, false, replace(setting, min_similarity=floor, min_score=score))
    if best[0] < 0:
        return 0, traps, setting
    return best


def _reaching(scores: NDArray[np.float64]) -> list[int]:
    """How many reach each threshold of `SCORES`."""
    return [int(count) for count in len(scores) - np.searchsorted(np.sort(scores), SCORES)]


def _known(measured: Measured, rows: Rows, name: str) -> bool:
    """Whether there are enough traps of the kind that a guard is for."""
    found = measured.found[:, measured.guards.index(name)]
    return int((found & ~measured.same & rows).sum()) >= _MIN_TRAPS


def _half(measured: Measured) -> Rows:
    """About half of the pairs, the same ones each time; pairs that share a question are in the same half."""
    even: Rows = np.array(question_groups(measured.pairs)) % 2 == 0
    return even


@dataclass(frozen=True, slots=True)
class GuardWeight:
    """How many pairs one guard alone stops, among those that are on."""

    guard: str
    stopped: int  # traps that would be served without it
    lost: int  # pairs that would rightly be served without it


def weigh(measured: Measured, setting: Setting) -> tuple[GuardWeight, ...]:
    """Count for every guard that is on what it alone stops, in their order."""
    used = [measured.guards.index(name) for name in setting.guards]
    found = measured.found[:, used]
    reached = measured.passing(replace(setting, guards=()))
    alone = found & (found.sum(axis=1) == 1)[:, None] & reached[:, None]
    stopped = (alone & ~measured.same[:, None]).sum(axis=0).tolist()
    lost = (alone & measured.same[:, None]).sum(axis=0).tolist()
    return tuple(
        GuardWeight(name, *counts) for name, *counts in zip(setting.guards, stopped, lost, strict=True)
    )


def by_category(measured: Measured, setting: Setting) -> dict[str, PairOutcome]:
    """Count what would be served of each category, sorted by name; pairs without a category are left out."""
    categories = np.array([pair.category for pair in measured.pairs])
    return {
        name: measured.outcome(setting, categories == name)
        for name in sorted(set(categories.tolist()) - {""})
    }
