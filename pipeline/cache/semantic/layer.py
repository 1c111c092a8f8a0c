"""The semantic layer: the nearest questions of the same scope, above a floor of the cosine, that a verifier passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeline.cache.backend import Backend, Candidate, Vector
from pipeline.cache.key import Question
from pipeline.cache.semantic.shareable import LETTERS, is_shareable

if TYPE_CHECKING:  # who has a verifier has imported it
    from pipeline.cache.semantic.decision import Decision, Verifier

_CANDIDATES = 4  # that are looked at; the nearest one that passes is taken


class TextEmbedder(Protocol):
    """What the layer needs of an embedder, such as `pipeline.cache.semantic.embedder.Embedder`."""

    digest: bytes  # of the model: two models never have the same

    def __call__(self, text: str, /) -> Vector | None: ...


@dataclass(frozen=True, slots=True)
class SemanticLayer:
    """See `pipeline.cache.response_cache.Semantic`.

    Embeddings of different models are not comparable, and a cache outlives the choice of its model. Each model's are
    therefore turned in a direction of its own, which keeps every cosine among them, and brings those between models
    near 0.

    Attributes:
        backend: finds what is near.
        embedder: text to vector.
        verifier: judges what is near.
        min_similarity: cosine that every hit needs.
        min_score: score that a hit needs; None: what the verifier needs by default.
        languages: see `is_shareable`.
        tenants: ids of those whose questions are shared among themselves; None: all.
    """

    backend: Backend
    embedder: TextEmbedder
    verifier: Verifier
    min_similarity: float
    min_score: float | None = None
    languages: Sequence[str] = tuple(LETTERS)
    tenants: frozenset[bytes] | None = None

    def embed(self, question: Question) -> Vector | None:
        """See `Semantic.embed`; None also for a question that is not shared."""
        declared = self.tenants is None or question.tenant in self.tenants
        if not (question.comparable and declared and is_shareable(question.turn, self.languages)):
            return None
        vector = self.embedder(question.turn)
        if vector is None:
            return None
        if not np.isfinite(vector).all():
            raise ValueError("the embedding holds what is not a number")
        self.verifier.prepare(question.turn)
        return vector * _signs(self.embedder.digest, len(vector))

    def near(self, question: Question, vector: Vector) -> Sequence[Candidate]:
        """See `Semantic.near`."""
        return self.backend.near(question.scope, vector, _CANDIDATES, self.min_similarity)

    def decide(self, question: Question, candidate: Candidate) -> Decision:
        """Judge whether the answer of a candidate serves a question."""
        return self.verifier.decide(question.turn, candidate.turn, candidate.similarity)

    def serves(self, question: Question, candidate: Candidate) -> bool:
        """See `Semantic.serves`."""
        least = self.verifier.default_min_score if self.min_score is None else self.min_score
        return self.decide(question, candidate).serves(least)


@lru_cache
def _signs(digest: bytes, dimensions: int) -> Vector:
    """1 or -1 for each dimension."""
    drawn = np.random.default_rng(int.from_bytes(digest, "little")).integers(2, size=dimensions)
    return (2 * drawn - 1).astype(np.float32)
