"""Choosing the setting that serves most within a budget of wrong hits, with a cross-validated estimate of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.tuning.measuring import CountedShare, Measured, PairOutcome, pairs_needed

_FOLDS = 5
Basis = Literal["interval", "rate", "fewest"]
# Traps that a check must have objected to before it can be judged whether it may be left out.
_MIN_TRAPS = 30


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """A setting for the recipe, and the evidence for it."""

    # Share of the traps that may be served.
    budget: float
    confidence: float
    # On all pairs.
    outcome: PairOutcome
    # Checks to leave out.
    skipped: tuple[str, ...]
    # Each fifth of the pairs at the setting that the others chose; None with too few pairs.
    held_out: PairOutcome | None
    # Traps, none of them served, that would bring the upper end of the interval within the budget.
    traps_needed: int

    @property
    def meets_budget(self) -> bool:
        """Whether the upper end of the interval is within the budget."""
        return self.basis == "interval"

    @property
    def basis(self) -> Basis:
        """What is within the budget: the upper end of the interval, the observed rate only, or nothing."""
        false = self.outcome.false
        if false.high(self.confidence) <= self.budget:
            return "interval"
        return "rate" if false.of and false.value <= self.budget else "fewest"


def choose(
    measured: Measured, *, budget: float, confidence: float = 0.95, may_skip: bool = False
) -> TunedSetting:
    """Choose the setting of most recall whose wrong hits are within the budget by the upper end of their interval.

    If no threshold shows that, the observed rate decides; if that is beyond the budget too, the fewest wrong hits do.

    Args:
        measured: the labelled pairs.
        budget: share of the traps that may be served.
        confidence: of the interval.
        may_skip: checks may be left out, one by one, where nothing is lost by it, neither on the pairs that chose them
            nor on those that did not.
    """
    if may_skip:
        choice = _choice(measured, budget, confidence, may_skip=True)
        shown = choice.held_out is not None and choice.held_out.false.high(confidence) <= budget
        if not choice.skipped or shown:
            return choice
    return _choice(measured, budget, confidence, may_skip=False)


def _choice(measured: Measured, budget: float, confidence: float, *, may_skip: bool) -> TunedSetting:
    everything = np.ones(len(measured.pairs), np.bool_)
    outcome, skipped = _best(measured, everything, budget, confidence, may_skip=may_skip)
    return TunedSetting(
        budget=budget,
        confidence=confidence,
        outcome=outcome,
        skipped=skipped,
        held_out=_held_out(measured, budget, confidence, may_skip=may_skip),
        traps_needed=pairs_needed(budget, confidence),
    )


def _best(
    measured: Measured, rows: NDArray[np.bool_], budget: float, confidence: float, *, may_skip: bool
) -> tuple[PairOutcome, tuple[str, ...]]:
    skipped: tuple[str, ...] = ()
    best = _threshold(measured, rows, budget, confidence, skipped)
    while may_skip:
        tried = [
            (_threshold(measured, rows, budget, confidence, (*skipped, name)), (*skipped, name))
            for name in measured.checks
            if name not in skipped and _known(measured, rows, name)
        ]
        better = [
            (outcome, names)
            for outcome, names in tried
            if outcome.recall.count > best.recall.count and outcome.false.count <= best.false.count
        ]
        if not better:
            break
        best, skipped = max(better, key=lambda found: found[0].recall.count)
    return best, skipped


def _threshold(
    measured: Measured, rows: NDArray[np.bool_], budget: float, confidence: float, skipped: Collection[str]
) -> PairOutcome:
    """Of settings that serve the same, the one with the highest threshold."""
    outcomes = [measured.outcome(threshold, skipped, rows) for threshold in measured.steps]
    fewest = min(outcome.false.count for outcome in outcomes)
    within = (
        [outcome for outcome in outcomes if outcome.false.high(confidence) <= budget]
        or [outcome for outcome in outcomes if outcome.false.value <= budget]
        or [outcome for outcome in outcomes if outcome.false.count == fewest]
    )
    return max(within, key=lambda outcome: (outcome.recall.count, outcome.threshold))


def _known(measured: Measured, rows: NDArray[np.bool_], name: str) -> bool:
    """Whether there are enough traps of the kind that a check is for."""
    objects = measured.objects[:, measured.checks.index(name)]
    return int((objects & ~measured.same & rows).sum()) >= _MIN_TRAPS


def _held_out(measured: Measured, budget: float, confidence: float, *, may_skip: bool) -> PairOutcome | None:
    groups = _groups(measured)
    if len(set(groups.tolist())) < _FOLDS:
        return None
    recall, false, thresholds = [0, 0], [0, 0], []
    for fold in range(_FOLDS):
        here = groups % _FOLDS == fold
        chosen, skipped = _best(measured, ~here, budget, confidence, may_skip=may_skip)
        found = measured.outcome(chosen.threshold, skipped, here)
        thresholds.append(chosen.threshold)
        for sums, share in ((recall, found.recall), (false, found.false)):
            sums[0] += share.count
            sums[1] += share.of
    return PairOutcome(float(np.mean(thresholds)), CountedShare(*recall), CountedShare(*false))


def _groups(measured: Measured) -> NDArray[np.int64]:
    """Pairs that share a question stay together, and so do those of one category where there are enough categories."""
    categories = sorted({pair.category for pair in measured.pairs})
    if len(categories) >= _FOLDS:
        return np.array([categories.index(pair.category) for pair in measured.pairs])
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        while (above := parent.setdefault(text, text)) != text:
            text = above
        return text

    for pair in measured.pairs:
        parent[root(pair.a)] = root(pair.b)
    roots = [root(pair.a) for pair in measured.pairs]
    number = {text: at for at, text in enumerate(dict.fromkeys(roots))}
    return np.array([number[text] for text in roots])


@dataclass(frozen=True, slots=True)
class CheckWeight:
    """How many pairs above the threshold one check alone stops, among those that are on."""

    check: str
    stopped: int  # traps that would be served without it
    lost: int  # pairs that would rightly be served without it


def weigh(measured: Measured, threshold: float, skipped: Collection[str] = ()) -> tuple[CheckWeight, ...]:
    """Count for every check that is on what it alone stops, in their order."""
    used = [at for at, name in enumerate(measured.checks) if name not in skipped]
    objects = measured.objects[:, used]
    alone = objects & (objects.sum(axis=1) == 1)[:, None] & (measured.values >= threshold)[:, None]
    stopped = (alone & ~measured.same[:, None]).sum(axis=0).tolist()
    lost = (alone & measured.same[:, None]).sum(axis=0).tolist()
    return tuple(
        CheckWeight(measured.checks[at], *counts) for at, *counts in zip(used, stopped, lost, strict=True)
    )


def by_category(
    measured: Measured, threshold: float, skipped: Collection[str] = ()
) -> dict[str, PairOutcome]:
    """Count what would be served of each category, sorted by name; pairs without a category are left out."""
    categories = np.array([pair.category for pair in measured.pairs])
    return {
        name: measured.outcome(threshold, skipped, categories == name)
        for name in sorted(set(categories.tolist()) - {""})
    }
