"""Choosing the setting that serves most within a budget of wrong hits, and promising no more than the pairs can show.

Candidates are what the recipe has, what it would have by default, and for each verifier the setting that does best on
one half of the pairs. How far the score of a candidate may be lowered is tested from the strictest threshold down, as
long as the exact bound on the share of traps served is within the budget: thresholds that are tested in a fixed order,
up to the first that fails, need no correction for their number (learn then test: A. Angelopoulos and others,
arXiv:2110.01052). Candidates that were fixed beforehand are tested by all pairs, and those that one half chose by the
other half: of many settings that are tried on the same pairs, the best looks better than it is. Of several candidates
each is tested with its part of the error that the confidence allows (Bonferroni), so that any of them may be taken.
With too few pairs for two halves, nothing but the score is chosen. With too few for that, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.tuning.measuring import (
    FLOORS,
    SCORES,
    PairMeasurements,
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
        confidence: confidence of the bound.
        outcome: outcome on all pairs.
        default: outcome of the default setting on all pairs.
        shown: outcome on the pairs that prove it: all of them, or the other half where one half chose the setting.
        bound: share of the traps that is not exceeded, with the confidence, by `shown`.
        basis: figure within the budget: the bound ("interval"), the observed rate only, or neither.
        candidates: settings that were tested, between which the error that the confidence allows is divided.
        can_show: the smallest budget that these pairs can show while any pair is served; None if there is none.
        traps_needed: traps, none of them served, that would show the budget.
    """

    budget: float
    confidence: float
    outcome: PairOutcome
    default: PairOutcome
    shown: PairOutcome
    bound: float
    basis: Basis
    candidates: int
    can_show: float | None
    traps_needed: int

    @property
    def setting(self) -> Setting:
        return self.outcome.setting

    @property
    def meets_budget(self) -> bool:
        """Whether the pairs show that the budget is kept."""
        return self.basis == "interval"

    @property
    def halved(self) -> bool:
        """Whether one half of the pairs chose the setting, and the other half shows what it keeps."""
        return self.shown.false.of < self.outcome.false.of


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Dials without a score, and the pairs that may show how low it can be."""

    setting: Setting
    rows: Rows


def choose(
    measured: PairMeasurements,
    start: Setting,
    *,
    default: Setting,
    budget: float,
    confidence: float = 0.95,
    all_dials: bool = True,
) -> TunedSetting:
    """Choose the setting of most recall of which the pairs show that it keeps the budget.

    If no threshold of any candidate shows that, the observed rate decides; if that is beyond the budget too, the fewest
    wrong hits do.

    Args:
        start: dials of the recipe.
        default: dials of a recipe that leaves them out.
        budget: share of the traps that may be served.
        confidence: confidence of the bound.
        all_dials: verifier, guards and floor may be changed, too, where there are enough pairs for two halves.
    """
    candidates = _candidates(measured, start, default, budget, confidence) if all_dials else []
    candidates = candidates or [_Candidate(start, _every(measured))]
    sure = 1 - (1 - confidence) / len(candidates)
    tested = [_lowest_shown(measured, candidate, budget, sure) for candidate in candidates]
    shown = [outcomes for outcomes, _ in tested if outcomes is not None]
    if shown:
        basis: Basis = "interval"
        # Among equals, the one that was fixed beforehand.
        on_all, on_rows = max(shown, key=lambda outcomes: outcomes[0].recall.count)
    else:
        on_all, basis = _by_rate(measured, [candidate.setting for candidate in candidates], budget)
        on_rows = on_all
    return TunedSetting(
        budget=budget,
        confidence=confidence,
        outcome=on_all,
        default=measured.outcome(default),
        shown=on_rows,
        bound=on_rows.false.bound(sure),
        basis=basis,
        candidates=len(candidates),
        can_show=min((least for _, least in tested if least is not None), default=None),
        traps_needed=pairs_needed(budget, sure),
    )


def _candidates(
    measured: PairMeasurements, start: Setting, default: Setting, budget: float, confidence: float
) -> list[_Candidate]:
    """List the candidates fixed beforehand, and the best of each verifier where a half is large enough to show it."""
    # Settings that differ in nothing but the score are one candidate.
    fixed = {replace(setting, min_score=0.0): setting for setting in (start, default)}
    candidates = [_Candidate(setting, _every(measured)) for setting in fixed.values()]
    # The same half each time; pairs that share a question are in the same one.
    showing: Rows = np.array(question_groups(measured.pairs)) % 2 == 0
    sure = 1 - (1 - confidence) / (len(candidates) + len(measured.scores))
    if int((showing & ~measured.same).sum()) >= pairs_needed(budget, sure):
        candidates += [
            _Candidate(_best(measured, replace(start, verifier=verifier), ~showing, budget), showing)
            for verifier in measured.scores
        ]
    return candidates


def _lowest_shown(
    measured: PairMeasurements, candidate: _Candidate, budget: float, confidence: float
) -> tuple[tuple[PairOutcome, PairOutcome] | None, float | None]:
    """Find the lowest threshold that keeps the budget: outcomes on all pairs and on those that show it; `can_show`."""
    best, can_show = None, None
    for score in reversed(SCORES):
        outcome = measured.outcome(replace(candidate.setting, min_score=score), candidate.rows)
        if not outcome.recall.count:
            continue
        bound = outcome.false.bound(confidence)
        can_show = bound if can_show is None else can_show
        if bound > budget:
            break
        best = outcome
    return None if best is None else (measured.outcome(best.setting), best), can_show


def _by_rate(
    measured: PairMeasurements, settings: Sequence[Setting], budget: float
) -> tuple[PairOutcome, Basis]:
    """Choose by the observed rate; of thresholds that serve the same, the highest."""
    outcomes = [
        measured.outcome(replace(setting, min_score=score)) for setting in settings for score in SCORES
    ]
    within = [outcome for outcome in outcomes if outcome.false.value <= budget]
    basis: Basis = "rate" if within else "fewest"
    fewest = min(outcome.false.count for outcome in outcomes)
    best = max(
        within or [outcome for outcome in outcomes if outcome.false.count == fewest],
        key=lambda outcome: (outcome.recall.count, outcome.setting.min_score),
    )
    return best, basis


def _best(measured: PairMeasurements, start: Setting, rows: Rows, budget: float) -> Setting:
    """Find the setting of a verifier that serves most of some pairs within the budget, by the rate observed there."""
    best = _best_levels(measured, start, rows, budget)
    while True:
        fewer = [
            _best_levels(
                measured,
                replace(best[2], guards=tuple(guard for guard in best[2].guards if guard != name)),
                rows,
                budget,
            )
            for name in best[2].guards
            if _known(measured, rows, name)
        ]
        # A guard goes only where more is served and no more of it wrongly.
        better = [level for level in fewer if level[0] > best[0] and level[1] <= best[1]]
        if not better:
            return best[2]
        best = max(better, key=lambda level: level[0])


def _best_levels(
    measured: PairMeasurements, setting: Setting, rows: Rows, budget: float
) -> tuple[int, int, Setting]:
    """Find floor and threshold that serve most within the budget; return true pairs, traps, and the setting.

    Of settings that serve the same, it is the strictest.
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
    """Count the scores that reach each threshold of `SCORES`."""
    return [int(count) for count in len(scores) - np.searchsorted(np.sort(scores), SCORES)]


def _known(measured: PairMeasurements, rows: Rows, name: str) -> bool:
    """Whether there are enough traps of the kind that a guard is for."""
    objections = measured.forbidden[:, measured.guards.index(name)]
    return int((objections & ~measured.same & rows).sum()) >= _MIN_TRAPS


def _every(measured: PairMeasurements) -> Rows:
    return np.ones(len(measured.pairs), np.bool_)


@dataclass(frozen=True, slots=True)
class GuardWeight:
    """Pairs that one guard alone stops, among those that are on: traps (`stopped`) and true pairs (`lost`)."""

    guard: str
    stopped: int
    lost: int


def weigh(measured: PairMeasurements, setting: Setting) -> tuple[GuardWeight, ...]:
    """Count for every guard that is on what it alone stops, in their order."""
    used = [measured.guards.index(name) for name in setting.guards]
    objections = measured.forbidden[:, used]
    reached = measured.passing(replace(setting, guards=()))
    alone = objections & (objections.sum(axis=1) == 1)[:, None] & reached[:, None]
    stopped = (alone & ~measured.same[:, None]).sum(axis=0).tolist()
    lost = (alone & measured.same[:, None]).sum(axis=0).tolist()
    return tuple(
        GuardWeight(name, *counts) for name, *counts in zip(setting.guards, stopped, lost, strict=True)
    )


def by_category(measured: PairMeasurements, setting: Setting) -> dict[str, PairOutcome]:
    """Count what would be served of each category, sorted by name; pairs without a category are left out."""
    categories = np.array([pair.category for pair in measured.pairs])
    return {
        name: measured.outcome(setting, categories == name)
        for name in sorted(set(categories.tolist()) - {""})
    }
