"""Questions and answers of tests of the cache, and parts for it: small ones, and ones that raise."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pipeline.cache.backend import Backend, Vector
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, Question, make_question
from pipeline.cache.redaction import Redaction
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.decision import Decision
from pipeline.cache.semantic.layer import SemanticLayer

NOW = 1_000_000.0  # s since the epoch


def question(text: str, tenant: str = "") -> Question:
    return make_question(Origin("package", tenant=tenant), text, {"temperature": 0})


def entry(text: str, ttl_s: float = 600, created: float = NOW) -> CacheEntry:
    return CacheEntry.of([StoredChunk(text)], finish_reason="stop", created=created, expires=created + ttl_s)


def unit(vector: object) -> Vector:
    floats = np.asarray(vector, np.float32)
    return np.asarray(floats / np.linalg.norm(floats), np.float32)


class Letters:
    """Near are texts with the same words."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    def __call__(self, text: str, /) -> Vector | None:
        if len(text) > 40:
            return None
        counts = np.zeros(64)
        for word in text.lower().strip("?.").split():
            counts[sum(map(ord, word)) % 64] += 1
        return unit(counts)


class Fine:
    default_min_score = 0.5

    def prepare(self, text: str) -> None:
        pass

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:  # noqa: ARG002
        return Decision(1.0, "negation" if "not" in candidate else None)


class Broken:
    """A part of the cache with an error of our own in one method."""

    def __init__(self, part: Any, method: str) -> None:
        self._part, self._method = part, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise TypeError("an error of our own")
        return getattr(self._part, name)

    def __call__(self, text: str) -> Any:
        return self.__getattr__("__call__")(text)


def broken(backend: Backend, part: str, method: str) -> ResponseCache:
    """A cache with embeddings, one part of which raises; a second goes by whenever it asks for the time."""
    parts: dict[str, Any] = {
        "backend": backend, "embedder": Letters(b"one"), "verifier": Fine(), "redactor": Redaction(),
    }  # fmt: skip
    parts[part] = Broken(parts[part], method)
    layer = SemanticLayer(parts["backend"], parts["embedder"], parts["verifier"], 0.7)
    cache = ResponseCache(parts["backend"], semantic=layer, redactor=parts["redactor"])
    cache.clock = itertools.count(1_000_000.0).__next__
    return cache
