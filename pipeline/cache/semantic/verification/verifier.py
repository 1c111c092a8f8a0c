"""The verifier that a cache uses: all checks, or those that a recipe leaves on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.cache.semantic.verification.checks import CHECKS
from pipeline.cache.semantic.verification.parsed_question import read


@dataclass(frozen=True, slots=True)
class Checked:
    """See `pipeline.cache.semantic.layer.Verifier`; `checks`: names of `CHECKS`, asked in that order."""

    checks: tuple[str, ...]

    def prepare(self, text: str) -> None:
        """Do nothing: a question is read when there is another beside it.

        Args:
            text: of a question; not used.
        """

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        """What the first check that objects says, such as "numbers: 3 and 4"; None if none does.

        Args:
            asked: text of the question that is asked.
            kept: text of the question whose answer is stored.
            similarity: cosine of their embeddings; not used.
        """
        del similarity  # the threshold is the layer's
        if asked == kept:
            return None
        one, other = read(asked), read(kept)
        for name in self.checks:
            if (found := CHECKS[name](one, other)) is not None:
                return found
        return None

    dial: ClassVar[Literal["min_similarity"]] = "min_similarity"

    @property
    def checks_alone(self) -> tuple[str, ...]:
        """Those that refuse a hit by themselves: all."""
        return self.checks

    def value(self, asked: str, kept: str, similarity: float) -> float:
        """What `dial` is about: nothing but the similarity.

        Args:
            asked: text of the question that is asked; not used.
            kept: text of the question whose answer is stored; not used.
            similarity: cosine of their embeddings.
        """
        del asked, kept
        return similarity

    def objecting(self, asked: str, kept: str, similarity: float) -> tuple[bool, ...]:
        """Which of the checks object.

        Args:
            asked: text of the question that is asked.
            kept: text of the question whose answer is stored.
            similarity: cosine of their embeddings; not used.

        Returns:
            One value for each of `checks`, in that order.
        """
        del similarity
        one, other = read(asked), read(kept)
        return tuple(asked != kept and CHECKS[name](one, other) is not None for name in self.checks)


def default_verifier(checks: Sequence[str] | None = None) -> Checked:
    """All checks, or the named ones.

    Args:
        checks: names of `CHECKS`, in the order in which they are asked; None: all.

    Raises:
        ValueError: a name is not known.
    """
    names = tuple(CHECKS) if checks is None else tuple(checks)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"checks {', '.join(unknown)}: not known (one of {', '.join(CHECKS)})")
    return Checked(names)
