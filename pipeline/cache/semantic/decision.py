"""Whether the answer to one question serves another: guards that may forbid it, and one score that decides.

The score is a logistic regression on what can be told of two questions in well under a millisecond: the cosine of their
embeddings, which words they share, which one of them has alone, their numbers and names, and how they open. Its
weights, the data that they were fitted to, and the licence of that data stand in data/decision.json, written by
scripts/fit_decision.

Three sets of weights: for English questions under the encoder that the cosines are known of; for other languages, where
nothing but the cosine is known; and, without the cosine, for other encoders, whose cosines mean something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any, Protocol

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.guards import GUARDS, findings, unshared_names, unshared_numbers
from pipeline.cache.semantic.words import QuestionWords, read

FEATURES = (
    "cosine", "nearness", "shared", "most_left", "added", "replaced", "numbers", "names", "opening",
)  # fmt: skip
_MOST = 4  # words that only one question has: more of them say nothing more
_NEAREST = 0.995  # cosine; beyond, it is rounding
_SAME_ENCODER = 0.05  # by which a cosine of a known encoder may be off, as 8-bit weights make it


@dataclass(frozen=True, slots=True)
class Decision:
    """What a verifier makes of two questions.

    Attributes:
        score: probability, 0 to 1, that the candidate's answer fits the question that is asked; of a pair that is
            forbidden, too.
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
class Regression:
    """A logistic regression on some of `FEATURES`."""

    bias: float
    weights: Mapping[str, float]

    def __call__(self, features: Mapping[str, float]) -> float:
        """The probability, 0 to 1."""
        logit = self.bias + sum(weight * features[name] for name, weight in self.weights.items())
        return 1 / (1 + exp(-max(-30.0, min(30.0, logit))))


@dataclass(frozen=True, slots=True)
class RegressionVerifier:
    """The default: the guards that are on, and a regression on the features of two texts.

    Attributes:
        guards: names of `pipeline.cache.semantic.guards.GUARDS` that may forbid.
        english: scores two English questions.
        other: scores any others; None: only the same words score, as 1.
        default_min_score: see `Verifier`.
    """

    guards: tuple[str, ...]
    english: Regression
    other: Regression | None
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
            The score, and the first finding of a guard that is on. The same words score 1.
        """
        one, other = (read(text) for text in sorted((question, candidate)))
        if one.words and one.words == other.words:
            return Decision(1.0)
        found = findings(question, candidate)
        forbidden = next((found[name] for name in self.guards if name in found), None)
        regression = self.english if one.english and other.english else self.other
        return Decision(0.0 if regression is None else regression(features(one, other, cosine)), forbidden)


def default_verifier(encoder: TextEncoder | None, guards: Sequence[str] | None = None) -> RegressionVerifier:
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
    stored = _stored()
    if encoder is None or is_known(encoder):
        english, other = _regression(stored["english"]), _regression(stored["other_languages"])
        return RegressionVerifier(names, english, other, stored["english"]["min_score"])
    alone = stored["other_encoders"]
    return RegressionVerifier(names, _regression(alone), None, alone["min_score"])


def is_known(encoder: TextEncoder) -> bool:
    """Whether the cosines are those of the encoder that the weights were fitted to, as a few pairs of sentences say."""
    for one, other, cosine in _stored()["encoder"]["cosines"]:
        vectors = encoder(one), encoder(other)
        if vectors[0] is None or vectors[1] is None:
            return False
        if abs(float(vectors[0] @ vectors[1]) - cosine) > _SAME_ENCODER:
            return False
    return True


def features(one: QuestionWords, other: QuestionWords, cosine: float) -> dict[str, float]:
    """What the score is made of, by the names of `FEATURES`; the order of the two questions does not matter."""
    here, there = set(one.content), set(other.content)
    left = sorted((len(here - there), len(there - here)))
    return {
        "cosine": cosine,
        "nearness": -log(1 - min(cosine, _NEAREST)),
        "shared": len(here & there) / max(1, len(here | there)),
        "most_left": min(left[1], _MOST),
        "added": float(left[0] == 0 and left[1] > 0),
        "replaced": float(left == [1, 1]),
        "numbers": float(sum(map(bool, unshared_numbers(one, other)))),
        "names": float(sum(map(bool, unshared_names(one, other)))),
        "opening": float(one.opening != other.opening),
    }


def _regression(raw: Mapping[str, Any]) -> Regression:
    return Regression(raw["bias"], raw["weights"])


@cache
def _stored() -> Mapping[str, Any]:
    stored: Mapping[str, Any] = json.loads(
        (files(__package__) / "data" / "decision.json").read_text(encoding="utf-8")
    )
    return stored
