"""The verifier with a scorer: some checks forbid, all of them are heard, and the scorer decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pipeline.cache.semantic.scoring.facts import Facts, facts
from pipeline.cache.semantic.scoring.scorer import AnotherEncoder, Scorer, load_scorer
from pipeline.cache.semantic.scoring.spelling import Knows, every_word, respelled
from pipeline.cache.semantic.verification.verifier import Checked, default_verifier

if TYPE_CHECKING:
    from pipeline.cache.semantic.embedder import Embedder

# Where both questions say something of these, the checks have the last word; the others object to other wordings, too.
FORBIDDING = ("numbers", "codes", "quotes", "joining", "names", "tenses", "sense", "order")


@dataclass(frozen=True, slots=True)
class Learned:
    """See `pipeline.cache.semantic.layer.Verifier`.

    `checks`: names of `CHECKS` that are left on. `min_score`: that a hit needs, in log odds; 0 is what the scorer was
    made for, more serves less.
    """

    scorer: Scorer
    checks: tuple[str, ...]
    min_score: float = 0.0
    knows: Knows = every_word  # whether a word is one, and no slip
    dial: ClassVar[Literal["min_score"]] = "min_score"

    def prepare(self, text: str) -> None:
        """See `Scorer.prepare`.

        Args:
            text: of a question.
        """
        self.scorer.prepare(text)

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        """What a forbidding check says; where the score is too low, what any check says, or "meaning: …".

        Args:
            asked: text of the question that is asked.
            kept: text of the question whose answer is stored.
            similarity: cosine of their embeddings.

        Returns:
            Why the stored answer does not serve; None if it does.
        """
        asked, kept = respelled(asked, kept, self.knows)
        if asked == kept:
            return None
        known = facts(asked, kept, similarity)
        if (forbidden := known.forbidden(self.checks)) is not None:
            return forbidden
        score = self._score(asked, kept, known)
        if score >= self.min_score:
            return None
        told = [known.objections[name] for name in self.checks if name in known.objections]
        return told[0] if told else f"meaning: scored {score:.1f}, {self.min_score:.1f} is needed"

    @property
    def checks_alone(self) -> tuple[str, ...]:
        """Those that refuse a hit by themselves."""
        return tuple(name for name in self.checks if name in FORBIDDING)

    def objecting(self, asked: str, kept: str, similarity: float) -> tuple[bool, ...]:
        """Which of `checks_alone` object.

        Args:
            asked: text of the question that is asked.
            kept: text of the question whose answer is stored.
            similarity: cosine of their embeddings.

        Returns:
            One value for each of `checks_alone`, in that order.
        """
        asked, kept = respelled(asked, kept, self.knows)
        if asked == kept:
            return (False,) * len(self.checks_alone)
        known = facts(asked, kept, similarity)
        return tuple(known.forbidden([name]) is not None for name in self.checks_alone)

    def value(self, asked: str, kept: str, similarity: float) -> float:
        """The score that `min_score` is about: log odds, above what the scorer itself asks for.

        Args:
            asked: text of the question that is asked.
            kept: text of the question whose answer is stored.
            similarity: cosine of their embeddings.

        Returns:
            The score. It is infinite for equal questions; without words to score, the checks decide
            between infinite and minus infinite.
        """
        asked, kept = respelled(asked, kept, self.knows)
        return math.inf if asked == kept else self._score(asked, kept, facts(asked, kept, similarity))

    def _score(self, asked: str, kept: str, known: Facts) -> float:
        least = self.scorer.min_score if known.objections else self.scorer.min_score_unopposed
        score = self.scorer(asked, kept, known.values)
        if score is None:  # without words to score, the checks decide
            return -math.inf if known.objections else math.inf
        return score - least


def verifier_for(
    embedder: Embedder,
    checks: Sequence[str] | None = None,
    *,
    scorer: bool | None = None,
    min_score: float = 0.0,
) -> Learned | Checked:
    """What judges near questions of an embedder: the scorer of this package, or the checks alone.

    Args:
        checks: names of `CHECKS`; None: all.
        scorer: whether it decides; None: where it was trained with this embedder.
        min_score: see `Learned`.

    Raises:
        ValueError: a name is not known, or a scorer is asked for that was trained with another embedder.
    """
    alone = default_verifier(checks)
    if scorer is False:
        return alone
    try:
        return Learned(load_scorer(embedder.states), alone.checks, min_score, embedder.knows)
    except AnotherEncoder:
        if scorer:
            raise
        return alone
