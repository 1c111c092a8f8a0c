"""The verifier with a scorer: some checks forbid, all of them are heard, and the scorer decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.cache.semantic.scoring.facts import Facts, facts
from pipeline.cache.semantic.scoring.scorer import AnotherEncoder, Scorer, load_scorer
from pipeline.cache.semantic.verification.verifier import Checked, default_verifier

if TYPE_CHECKING:
    from pipeline.cache.semantic.embedder import Embedder

SCORER = "scorer"  # beside the names of checks
# Where both questions say something of these, the checks have the last word; the others object to other wordings, too.
FORBIDDING = ("numbers", "codes", "quotes", "joining", "names", "order")


@dataclass(frozen=True, slots=True)
class Learned:
    """See `pipeline.cache.semantic.layer.Verifier`; `checks`: names of `CHECKS` that are left on."""

    scorer: Scorer
    checks: tuple[str, ...]

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        """What a forbidding check says; what any check says, or "meaning: …", where the score is too low."""
        if asked == kept:
            return None
        known = facts(asked, kept, similarity)
        if (forbidden := known.forbidden(self.checks)) is not None:
            return forbidden
        score, least = self.scorer(asked, kept, known.values), self._least(known)
        if score is not None and score >= least:
            return None
        told = [known.objections[name] for name in self.checks if name in known.objections]
        unlike = None if score is None else f"meaning: scored {score:.1f}, {least:.1f} is needed"
        return told[0] if told else unlike

    @property
    def parts(self) -> tuple[str, ...]:
        """What may object, each by itself."""
        return *(name for name in self.checks if name in FORBIDDING), SCORER

    def objecting(self, asked: str, kept: str, similarity: float) -> tuple[bool, ...]:
        """Which of the parts object."""
        if asked == kept:
            return (False,) * len(self.parts)
        known = facts(asked, kept, similarity)
        score = self.scorer(asked, kept, known.values)
        low = score < self._least(known) if score is not None else bool(known.objections)
        return *(known.forbidden([name]) is not None for name in self.parts[:-1]), low

    def _least(self, known: Facts) -> float:
        return self.scorer.min_score if known.objections else self.scorer.min_score_unopposed


def verifier_for(
    embedder: Embedder, checks: Sequence[str] | None = None, *, scorer: bool | None = None
) -> Learned | Checked:
    """What judges near questions of an embedder: the scorer of this package, or the checks alone.

    Args:
        checks: names of `CHECKS`; None: all.
        scorer: whether it decides; None: where it was trained with this embedder.

    Raises:
        ValueError: a name is not known, or a scorer is asked for that was trained with another embedder.
    """
    alone = default_verifier(checks)
    if scorer is False:
        return alone
    try:
        return Learned(load_scorer(embedder.states), alone.checks)
    except AnotherEncoder:
        if scorer:
            raise
        return alone
