"""The semantic layer: the nearest questions of the same scope, above a threshold, that pass every check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from pipeline.cache.backend import Backend, Vector
from pipeline.cache.key import Question
from pipeline.cache.response_cache import Near

_CANDIDATES = 4  # that are looked at; the nearest one that passes is taken


class Verifier(Protocol):
    """Judges whether the answer to one question serves another."""

    def prepare(self, text: str) -> None:
        """Make what is needed of a question by itself, while its embedding is at hand."""

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        """Why not, such as "numbers differ"; None if it does."""


class Embeds(Protocol):
    """What is needed of an embedder; `pipeline.cache.semantic.embedder.Embedder` is one."""

    digest: bytes  # of the model: two models never have the same

    def __call__(self, text: str, /) -> Vector | None: ...


@dataclass(frozen=True, slots=True)
class SemanticLayer:
    """See `pipeline.cache.response_cache.Semantic`.

    Embeddings of different models are not comparable, and a cache outlives the choice of its model. Each model's are
    therefore turned in a direction of its own, which keeps every cosine among them, and brings those between models
    near 0.
    """

    backend: Backend
    embedder: Embeds
    verifier: Verifier
    min_similarity: float  # cosine

    def embed(self, question: Question) -> Vector | None:
        vector = self.embedder(question.turn) if question.comparable else None
        if vector is None:
            return None
        self.verifier.prepare(question.turn)
        return vector * _signs(self.embedder.digest, len(vector))

    def find(self, question: Question, vector: Vector) -> Near | None:
        for candidate in self.backend.near(question.scope, vector, _CANDIDATES, self.min_similarity):
            if self.verifier.objection(question.turn, candidate.turn, candidate.similarity) is None:
                return Near(candidate.key, candidate.similarity)
        return None


@lru_cache
def _signs(digest: bytes, dimensions: int) -> Vector:
    """1 or -1 for each dimension."""
    drawn = np.random.default_rng(int.from_bytes(digest, "little")).integers(2, size=dimensions)
    return (2 * drawn - 1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several verifiers; the first objection counts."""

    verifiers: Sequence[Verifier]

    def prepare(self, text: str) -> None:
        for verifier in self.verifiers:
            verifier.prepare(text)

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        for verifier in self.verifiers:
            if (found := verifier.objection(asked, kept, similarity)) is not None:
                return found
        return None
