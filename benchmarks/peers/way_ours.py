"""Ours: one SQLite file, exact lookup before semantic lookup with its checks, as a recipe sets it up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from measuring import Questions

from pipeline.cache.backend import Capacity, Vector
from pipeline.cache.entry import StoredChunk
from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.response_cache import HotTier, ResponseCache
from pipeline.cache.semantic.layer import SemanticLayer, Verifier, VerifierChain
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
        from pipeline.cache.semantic.verification import default_verifier

        return default_verifier()

    def __init__(self, questions: Questions, folder: Path, _redis_url: str) -> None:
        folder.mkdir()
        self._questions, self._folder = questions, folder
        backend = SqliteBackend(folder / "cache.db", Capacity(entries=2 * len(questions.stored)))
        layer = SemanticLayer(backend, _Given(questions), self.verifier(), 0.85)
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


class Scored(SQLite):
    """With the learned scorer, for the encoder in $ENCODER.

    What is made of the encoder's states is there, as the embedding is.
    """

    def verifier(self) -> Verifier:
        from pipeline.cache.semantic.embedder import Embedder
        from pipeline.cache.semantic.scoring import Learned, load_scorer
        from pipeline.cache.semantic.scoring.scorer import PROBE
        from pipeline.cache.semantic.verification import CHECKS

        embedder, asked = Embedder(Path(os.environ["ENCODER"])), range(len(self._questions.near))
        kept = [self._questions.text(self._questions.targets[at]) for at in asked]
        texts = [PROBE, *kept, *(self._questions.near_text(at) for at in asked)]
        states = {text: embedder.states(text) for text in texts}
        learned = Learned(load_scorer(states.__getitem__), tuple(CHECKS))
        for text in texts:
            learned.prepare(text)
        return _Prepared(learned)


@dataclass(frozen=True)
class _Prepared:
    """For all questions that will be compared, that is done."""

    verifier: Verifier

    def prepare(self, text: str) -> None:
        pass

    def objection(self, asked: str, kept: str, similarity: float) -> str | None:
        return self.verifier.objection(asked, kept, similarity)


class Unchecked(SQLite):
    """What is near counts as the same: as the peers do, and to see what the checks cost."""

    def verifier(self) -> Verifier:
        return VerifierChain(())


def _question(text: str) -> Question:
    return make_question(Origin("package"), text, {"temperature": 0, "max_tokens": 64})
