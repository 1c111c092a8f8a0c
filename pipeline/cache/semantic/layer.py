"""The semantic layer: the nearest questions of the same scope, above a floor of the cosine, that a verifier passes.

Only short questions in languages that the recipe lists are looked up and stored by meaning. Two cheap tests decide,
both of which err to the side of the exact cache, which serves every text:

- A language is recognised by its letters alone. One that is not listed is noticed if it has letters that no listed
  one has: other scripts, Vietnamese, Polish, Turkish or Danish. Italian and Dutch, which do with the letters of the
  measured four, and whatever is typed without its accents, are not noticed.
- Text to work on ("translate: …", code, a document) is no question. It is recognised by its form: more than `MAX_CHARS`
  characters, several lines, something after a colon and a space, or quotation marks or backticks around something.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pipeline.cache.backend import Backend, Candidate, Vector
from pipeline.cache.key import Question

if TYPE_CHECKING:
    from pipeline.cache.semantic.decision import Decision, Verifier
    from pipeline.cache.semantic.embedder import Embedder

# Candidates that are looked at; the nearest one that passes is taken.
_CANDIDATES = 4
# ISO 639-1 -> letters in lower case besides a to z.
LETTERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "en": frozenset(),
        "de": frozenset("äöüß"),
        "fr": frozenset("àâæçéèêëîïôœùûüÿ"),
        "es": frozenset("áéíñóúü"),
    }
)
# Of 9,917 pairs of questions that people asked on Quora, 0.6 % hold a longer one.
MAX_CHARS = 200
_PAYLOAD = re.compile(
    r"""\S\s*[\n\r\v\f\x85\u2028\u2029]\s*\S|[:：]\s+\S|"[^"]+"|[“„][^“”]+[“”]|«[^»]+»|`[^`]+`"""
)


def is_shareable(text: str, languages: Sequence[str]) -> bool:
    """Whether a text is a question in one of some languages: keys of `LETTERS`, or "any".

    >>> [is_shareable(text, ["en"]) for text in ("Is it open?", "Ist es geöffnet?", "Translate: it is open")]
    [True, False, False]
    """
    if len(text) > MAX_CHARS or _PAYLOAD.search(text):
        return False
    return "any" in languages or not _has_foreign_letters(text, languages)


def _has_foreign_letters(text: str, languages: Sequence[str]) -> bool:
    """Whether a letter, a mark or a digit belongs to none of the languages."""
    others = {letter for letter in unicodedata.normalize("NFC", text).lower() if not letter.isascii()}
    known = frozenset().union(*(LETTERS[language] for language in languages))
    return any(
        unicodedata.category(character)[0] in "LM" or character.isdecimal() for character in others - known
    )


@dataclass(frozen=True, slots=True)
class SemanticLayer:
    """Semantic lookup: embeds questions, finds near ones, and lets the verifier judge them.

    Embeddings of different models are not comparable, and a cache outlives the choice of its model. Each model's are
    therefore turned in a direction of its own, which keeps every cosine among them, and brings those between models
    near 0.

    Attributes:
        backend: finds near questions.
        verifier: judges them.
        min_similarity: cosine that every hit needs.
        min_score: score that a hit needs; None: what the verifier needs by default.
        languages: see `is_shareable`.
        tenants: ids of the tenants that share near questions, each its own; None: all.
    """

    backend: Backend
    embedder: Embedder
    verifier: Verifier
    min_similarity: float
    min_score: float | None = None
    languages: Sequence[str] = tuple(LETTERS)
    tenants: frozenset[bytes] | None = None

    def embed(self, question: Question) -> Vector | None:
        """Embed a question; None if it is too long, or not shared by meaning."""
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
        """Find the entries whose questions are near enough, the nearest first. Raises BackendDown."""
        return self.backend.near(question.scope, vector, _CANDIDATES, self.min_similarity)

    def decide(self, question: Question, candidate: Candidate) -> Decision:
        """Judge whether the answer of a candidate serves a question."""
        return self.verifier.decide(question.turn, candidate.turn, candidate.similarity)

    def serves(self, question: Question, candidate: Candidate) -> bool:
        """Whether the answer of a candidate serves this question too."""
        least = self.verifier.default_min_score if self.min_score is None else self.min_score
        return self.decide(question, candidate).serves(least)


@lru_cache
def _signs(digest: bytes, dimensions: int) -> Vector:
    """Draw 1 or -1 for each dimension."""
    drawn = np.random.default_rng(int.from_bytes(digest, "little")).integers(2, size=dimensions)
    return (2 * drawn - 1).astype(np.float32)
