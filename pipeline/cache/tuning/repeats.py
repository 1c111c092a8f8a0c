"""A log of questions without labels: how many are near another, and which pairs a person should label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.semantic.decision import Embed, Verifier
from pipeline.cache.tuning.pairs import LoggedQuestion

# Questions that are compared.
MOST = 50_000
# Pairs that are less near are left out.
MIN_SIMILARITY = 0.5
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class NearPair:
    """A question, and the nearest other one of its scope."""

    a: str
    b: str
    similarity: float
    # Whether a cache would serve one with the answer to the other.
    served: bool


@dataclass(frozen=True, slots=True)
class Repeats:
    """A log of questions, compared with itself."""

    questions: int
    # Different texts, per scope.
    different: int
    # Each pair once, the nearest first.
    nears: tuple[NearPair, ...]

    def near(self, threshold: float) -> int:
        """Count the pairs that are at least as near."""
        return sum(near.similarity >= threshold for near in self.nears)

    def served(self, threshold: float) -> int:
        """Count those of them that would share an answer."""
        return sum(near.similarity >= threshold and near.served for near in self.nears)

    def merged(self) -> list[NearPair]:
        """Return those that would share an answer, the nearest first."""
        return [near for near in self.nears if near.served]


def find_repeats(
    log: Sequence[LoggedQuestion], embed: Embed, verifier: Verifier, min_score: float
) -> Repeats:
    """Compare the last `MOST` questions, each with the others of its scope.

    Args:
        verifier: judges which pairs would share an answer.
        min_score: score that they need.
    """
    texts = list(dict.fromkeys(log[-MOST:]))
    scopes: dict[str, list[str]] = {}
    for logged in texts:
        scopes.setdefault(logged.scope, []).append(logged.question)
    nears = [
        NearPair(a, b, similarity, verifier.decide(a, b, similarity).serves(min_score))
        for questions in scopes.values()
        for a, b, similarity in _nearest(questions, embed)
    ]
    return Repeats(len(log), len(texts), tuple(sorted(nears, key=lambda near: -near.similarity)))


def _nearest(questions: Sequence[str], embed: Embed) -> list[tuple[str, str, float]]:
    embedded = [(text, vector) for text in questions if (vector := embed(text)) is not None]
    if len(embedded) < 2:
        return []
    vectors: NDArray[np.float32] = np.stack([vector for _, vector in embedded])
    pairs: dict[tuple[int, int], float] = {}
    for start in range(0, len(embedded), _BLOCK):
        cosines = vectors[start : start + _BLOCK] @ vectors.T  # [block, questions]
        cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))] = -1  # itself
        for row, at in enumerate(cosines.argmax(axis=1).tolist()):
            if cosines[row, at] >= MIN_SIMILARITY:
                here = start + row
                pairs[min(here, at), max(here, at)] = float(cosines[row, at])
    return [(embedded[a][0], embedded[b][0], similarity) for (a, b), similarity in pairs.items()]
