"""Questions and answers of the contract tests."""

from __future__ import annotations

import numpy as np

from pipeline.cache.backend import Vector
from pipeline.cache.entry import Entry, Piece
from pipeline.cache.key import Origin, Question, ask

NOW = 1_000_000.0  # s since the epoch


def question(text: str, tenant: str = "") -> Question:
    return ask(Origin("package", tenant=tenant), text, {"temperature": 0})


def entry(text: str, ttl_s: float = 600, created: float = NOW) -> Entry:
    return Entry.of([Piece(text)], finish_reason="stop", created=created, expires=created + ttl_s)


def unit(vector: object) -> Vector:
    floats = np.asarray(vector, np.float32)
    return np.asarray(floats / np.linalg.norm(floats), np.float32)
