"""Entries as the bytes that a backend keeps, encrypted if there is a key, and back.

What cannot be read (damaged, written by something else, encrypted with another key) is counted and treated as a miss:
it never fails a request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.cache.backend import Candidate, Vector
from pipeline.cache.encryption import Codec, PlainCodec, UnreadableEntry
from pipeline.cache.entry import CacheEntry
from pipeline.cache.key import Question

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """An entry as bytes."""

    key: bytes
    scope: bytes
    engine: bytes
    tenant: bytes
    turn: bytes
    answer: bytes
    vector: bytes | None
    created: float  # s since the epoch
    expires: float

    @property
    def size(self) -> int:
        """Bytes that count against the capacity."""
        return len(self.turn) + len(self.answer) + len(self.vector or b"")


class EntryCodec:
    """Packs and reads entries; safe to use from any number of threads."""

    def __init__(self, codec: Codec | None = None) -> None:
        self._codec = codec or PlainCodec()
        # Whether a server sees nothing of questions, answers and embeddings.
        self.sealed = not isinstance(self._codec, PlainCodec)
        # Entries that were met and could not be read.
        self.unreadable = 0

    def pack(self, question: Question, entry: CacheEntry, vector: Vector | None) -> PackedEntry:
        """Pack an entry; its embedding as 16-bit floats."""
        key, seal = question.key, self._codec.seal
        return PackedEntry(
            key,
            question.scope,
            question.engine,
            question.tenant,
            seal(question.turn.encode(), key),
            seal(entry.raw, key),
            None if vector is None else seal(vector.astype("<f2").tobytes(), key),
            entry.created,
            entry.expires,
        )

    def entry(self, answer: bytes, key: bytes) -> CacheEntry | None:
        """Read an entry; None if it cannot be read."""
        try:
            return CacheEntry.from_bytes(self._codec.open(answer, key))
        except (UnreadableEntry, ValueError) as error:
            self._count(key, error)
            return None

    def both(self, turn: bytes, answer: bytes, key: bytes) -> tuple[str, CacheEntry] | None:
        """Read a question and its entry; None if one of them cannot be read."""
        question = self.turn(turn, key)
        entry = None if question is None else self.entry(answer, key)
        return None if question is None or entry is None else (question, entry)

    def candidates(self, found: Iterable[tuple[bytes, bytes, float]]) -> list[Candidate]:
        """Read the questions of (key, packed question, cosine); those that cannot be read are left out."""
        opened = [(key, self.turn(turn, key), cosine) for key, turn, cosine in found]
        return [Candidate(key, turn, cosine) for key, turn, cosine in opened if turn is not None]

    def turn(self, turn: bytes, key: bytes) -> str | None:
        """Read a question; None if it cannot be read."""
        try:
            return self._codec.open(turn, key).decode()
        except (UnreadableEntry, ValueError) as error:
            self._count(key, error)
            return None

    def vector(self, vector: bytes, key: bytes, dimensions: int) -> Vector | None:
        """Read an embedding; None if it cannot be read, has other dimensions, or holds a value that is not finite."""
        try:
            packed = self._codec.open(vector, key)
        except UnreadableEntry as error:
            self._count(key, error)
            return None
        if len(packed) != 2 * dimensions:
            return None
        found = np.frombuffer(packed, "<f2").astype(np.float32)
        # One that is not finite would spoil the index of all others.
        return found if np.isfinite(found).all() else None

    def _count(self, key: bytes, error: Exception) -> None:
        if not self.unreadable:
            _log.warning("the response cache holds what cannot be read, such as %s: %s", key.hex(), error)
        self.unreadable += 1
