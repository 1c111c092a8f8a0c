"""The semantic layer: the nearest questions of the same scope, above a threshold, that pass every check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.cache.backend import Backend, Vector
from pipeline.cache.key import Question
from pipeline.cache.response_cache import Near
from pipeline.cache.semantic.embedder import Embedder

_CANDIDATES = 4  # that are looked at; the nearest one that passes is taken


class Verifier(Protocol):
    """Judges whether the answer to one question serves another."""

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        """Why not, such as "numbers differ"; None if it does."""


@dataclass(frozen=True, slots=True)
class SemanticLayer:
    """See `pipeline.cache.response_cache.Semantic`."""

    backend: Backend
    embedder: Embedder
    verifier: Verifier
    min_similarity: float  # cosine

    def embed(self, question: Question) -> Vector | None:
        return self.embedder(question.turn) if question.comparable else None

    def find(self, question: Question, vector: Vector) -> Near | None:
        for candidate in self.backend.near(question.scope, vector, _CANDIDATES):
            if candidate.similarity < self.min_similarity:
                return None
            if self.verifier.objection(question.turn, candidate.turn, candidate.similarity) is None:
                return Near(candidate.key, candidate.similarity)
        return None


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several verifiers; the first objection counts."""

    verifiers: Sequence[Verifier]

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        for verifier in self.verifiers:
            if (found := verifier.objection(asked, kept, similarity)) is not None:
                return found
        return None
