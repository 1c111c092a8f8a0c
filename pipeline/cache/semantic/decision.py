"""Whether the answer to one question serves another: guards that may forbid it, and one score that decides.

By default the score is the cosine of the embeddings. Regressions on what else can be told of two questions (the words
that they share, their lengths, names and numbers that only one has, how their tokens align) do better on the pairs that
they were fitted to, and worse on others: docs/adr/0015.

What cosine is near enough depends on the encoder. For all-MiniLM-L6-v2 it stands in data/decision.json, with cosines by
which that encoder is known again; with any other one only the same words pass, until the recipe has `min_score`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.guards import GUARDS, findings, read

_SAME_ENCODER = 0.05  # by which a cosine of a known encoder may be off, as 8-bit weights make it
_SAME_WORDS = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a verifier makes of two questions.

    Attributes:
        score: how well the candidate's answer fits the question that is asked, at most 1; of a pair that is forbidden,
            too.
        forbidden: which guard forbids a hit whatever the score, and what it found, such as "numbers: 3 and 4"; None
            if none does. The guard's name is what stands before the colon.
    """

    score: float
    forbidden: str | None = None

    def serves(self, min_score: float) -> bool:
        """Whether the answer may be served at a threshold of the score."""
        return self.forbidden is None and self.score >= min_score


class Verifier(Protocol):
    """Judges near questions; safe to use from any number of threads."""

    @property
    def default_min_score(self) -> float:
        """The score that a hit needs where the recipe does not say."""

    def prepare(self, text: str) -> None:
        """Compute what is needed of a question by itself, while its embedding is at hand."""

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:
        """Judge whether the answer to one question serves another.

        Args:
            question: text that is asked.
            candidate: text of the stored question.
            cosine: of their embeddings, -1 to 1.
        """


class TextEncoder(Protocol):
    """What is needed of an encoder to know it again."""

    def __call__(self, text: str, /) -> Vector | None: ...


@dataclass(frozen=True, slots=True)
class CosineVerifier:
    """The default: the guards that are on, and the cosine.

    Attributes:
        guards: names of `pipeline.cache.semantic.guards.GUARDS` that may forbid.
        default_min_score: see `Verifier`.
    """

    guards: tuple[str, ...]
    default_min_score: float

    def prepare(self, text: str) -> None:
        """Take the question apart, and keep that.

        Args:
            text: of a question.
        """
        read(text)

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:
        """See `Verifier.decide`. The order of the two questions does not matter.

        Args:
            question: text that is asked.
            candidate: text of the stored question.
            cosine: of their embeddings, -1 to 1.

        Returns:
            The cosine, and the first finding of a guard that is on. The same words score 1.
        """
        words = read(question).words
        if words and words == read(candidate).words:
            return Decision(_SAME_WORDS)
        found = findings(question, candidate)
        return Decision(cosine, next((found[name] for name in self.guards if name in found), None))


def default_verifier(encoder: TextEncoder | None, guards: Sequence[str] | None = None) -> CosineVerifier:
    """Make the verifier of this package for an encoder.

    Args:
        encoder: gives the embeddings whose cosines `decide` is told; None: all-MiniLM-L6-v2 does.
        guards: names of guards that may forbid; None: all.

    Raises:
        ValueError: the name of a guard is not known.
    """
    names = tuple(GUARDS) if guards is None else tuple(guards)
    if unknown := [name for name in names if name not in GUARDS]:
        raise ValueError(f"guards {', '.join(unknown)}: not known (one of {', '.join(GUARDS)})")
    known = encoder is None or is_known(encoder)
    return CosineVerifier(names, _stored()["min_score"] if known else _SAME_WORDS)


def is_known(encoder: TextEncoder) -> bool:
    """Whether the cosines are those of the encoder that the threshold is for, as a few pairs of sentences say."""
    for one, other, cosine in _stored()["encoder"]["cosines"]:
        vectors = encoder(one), encoder(other)
        if vectors[0] is None or vectors[1] is None:
            return False
        if abs(float(vectors[0] @ vectors[1]) - cosine) > _SAME_ENCODER:
            return False
    return True


@cache
def _stored() -> Mapping[str, Any]:
    stored: Mapping[str, Any] = json.loads(
        (files(__package__) / "data" / "decision.json").read_text(encoding="utf-8")
    )
    return stored
