"""The semantic layer: the nearest questions of the same scope, above a threshold, that pass every check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from pipeline.cache.backend import Backend, Candidate, Vector
from pipeline.cache.key import Question

_CANDIDATES = 4  # that are looked at; the nearest one that passes is taken
# Of a question that is compared: 256 tokens seldom have as many, and to read more takes long.
_MAX_CHARS = 8192


class Verifier(Protocol):
    """Decides whether the answer to one question serves another."""

    def prepare(self, text: str) -> None:
        """Compute what is needed of a question by itself, while its embedding is at hand."""

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        """Return why it does not, such as "numbers differ"; None if it does."""


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
    """

    backend: Backend
    embedder: TextEmbedder
    verifier: Verifier
    min_similarity: float  # cosine

    def embed(self, question: Question) -> Vector | None:
        if not question.comparable or len(question.turn) > _MAX_CHARS:
            return None
        vector = self.embedder(question.turn)
        if vector is None:
            return None
        if not np.isfinite(vector).all():
            raise ValueError("the embedding holds what is not a number")
        self.verifier.prepare(question.turn)
        return vector * _signs(self.embedder.digest, len(vector))

    def near(self, question: Question, vector: Vector) -> Sequence[Candidate]:
        return self.backend.near(question.scope, vector, _CANDIDATES, self.min_similarity)

    def serves(self, question: Question, candidate: Candidate) -> bool:
        return self.verifier.objection(question.turn, candidate.turn, candidate.similarity) is None


@lru_cache
def _signs(digest: bytes, dimensions: int) -> Vector:
    """1 or -1 for each dimension."""
    drawn = np.random.default_rng(int.from_bytes(digest, "little")).integers(2, size=dimensions)
    return (2 * drawn - 1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class VerifierChain:
    """Asks several verifiers in turn; the first objection counts."""

    verifiers: Sequence[Verifier]

    def prepare(self, text: str) -> None:
        for verifier in self.verifiers:
            verifier.prepare(text)

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        for verifier in self.verifiers:
            if (found := verifier.objection(asked, kept, similarity)) is not None:
                return found
        return None
