"""Whether the answer to one question serves another: guards that may forbid it, and one score that decides.

By default the score is the cosine of the embeddings. Regressions on what else can be told of two questions (the words
that they share, their lengths, names and numbers that only one has, how their tokens align) do better on the pairs that
they were fitted to, and worse on others: docs/adr/0015.

What cosine is near enough depends on the encoder. For all-MiniLM-L6-v2 it stands in data/decision.json, with cosines by
which that encoder is known again; with any other one only the same words pass, until the recipe has `min_score`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.guards import GUARDS, findings, read

# Text to embedding, float32 [dimensions] of length 1; None if the text is too long.
Embed = Callable[[str], Vector | None]
# Difference of a cosine that 8-bit weights of a known encoder may make.
_SAME_ENCODER = 0.05
_SAME_WORDS = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Verdict of a verifier on two questions.

    Attributes:
        score: how well the candidate's answer fits the question that is asked, at most 1; also of a forbidden pair.
        forbidden: guard that forbids a hit whatever the score, and its finding, such as "numbers: 3 and 4"; None if
            none does.
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
        """Score that a hit needs where the recipe does not say."""

    def prepare(self, text: str) -> None:
        """Compute the part of a judgement that needs one question alone, while its embedding is made."""

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:
        """Judge whether the answer to one question serves another.

        Args:
            question: text that is asked.
            candidate: text of the stored question.
            cosine: cosine of their embeddings, -1 to 1.
        """


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
        read(text)

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:
        """Return the cosine, and the first finding of a guard that is on. The same words score 1."""
        question_words = read(question).words
        if question_words and question_words == read(candidate).words:
            return Decision(_SAME_WORDS)
        by_guard = findings(question, candidate)
        return Decision(cosine, next((by_guard[name] for name in self.guards if name in by_guard), None))


def default_verifier(encoder: Embed | None, guards: Sequence[str] | None = None) -> CosineVerifier:
    """Make the verifier of this package for an encoder.

    Args:
        encoder: makes the embeddings whose cosines `decide` gets; None: all-MiniLM-L6-v2.
        guards: names of guards that may forbid; None: all.

    Raises:
        ValueError: the name of a guard is not known.
    """
    names = tuple(GUARDS) if guards is None else tuple(guards)
    if unknown := [name for name in names if name not in GUARDS]:
        raise ValueError(f"guards {', '.join(unknown)}: not known (one of {', '.join(GUARDS)})")
    known = encoder is None or is_known(encoder)
    return CosineVerifier(names, _stored()["min_score"] if known else _SAME_WORDS)


def is_known(encoder: Embed) -> bool:
    """Whether an encoder is the one of the stored threshold, by its cosines of a few pairs of sentences."""
    for first, second, cosine in _stored()["encoder"]["cosines"]:
        vectors = encoder(first), encoder(second)
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
