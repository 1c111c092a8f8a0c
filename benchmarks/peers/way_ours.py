"""Ours: one SQLite file, exact lookup before semantic lookup with guards and score, as a recipe sets it up."""

from __future__ import annotations

from pathlib import Path

from measuring import Questions

from pipeline.cache.backend import Capacity, Vector
from pipeline.cache.entry import StoredChunk
from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.response_cache import HotTier, ResponseCache
from pipeline.cache.semantic.decision import Decision, Verifier, default_verifier
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.cache.sqlite import SqliteBackend


class _Given:
    digest = b"given"

    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    def __call__(self, text: str, /) -> Vector | None:
        vector: Vector = self._questions.embed(text)
        return vector


class SQLite:
    """Every request of a key is one as an application asks it: a digest of all that can change its answer."""

    in_memory = 0  # entries

    def verifier(self) -> Verifier:
        return default_verifier(None)

    def __init__(self, questions: Questions, folder: Path, _redis_url: str) -> None:
        folder.mkdir()
        self._questions, self._folder = questions, folder
        backend = SqliteBackend(folder / "cache.db", Capacity(entries=2 * len(questions.stored)))
        # The near questions have a cosine of 0.93.
        layer = SemanticLayer(backend, _Given(questions), self.verifier(), 0.85, 0.9)
        self.cache = ResponseCache(backend, semantic=layer, hot_tier=HotTier(self.in_memory))

    def store(self, text: str, answer: str) -> None:
        pieces = [StoredChunk(answer)]
        assert self.cache.store(_question(text), pieces, finish_reason="stop", output_tokens=32)

    def lookup(self, text: str) -> str | None:
        hit = self.cache.lookup(_question(text))
        return None if hit is None else hit.entry.text

    def size(self) -> int:
        return sum(path.stat().st_size for path in self._folder.iterdir())

    def close(self) -> None:
        self.cache.close()


class Memory(SQLite):
    """The same, with what was used last in the memory of the process."""

    in_memory = 200_000


class Unchecked(SQLite):
    """Near questions count as the same: as with the peers, and to see what guards and score cost."""

    def verifier(self) -> Verifier:
        return _Anything()


class _Anything:
    default_min_score = 0.0

    def prepare(self, text: str) -> None:
        pass

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:  # noqa: ARG002
        return Decision(1.0)


def _question(text: str) -> Question:
    return make_question(Origin("package"), text, {"temperature": 0, "max_tokens": 64})
