"""What goes into a backend, and what comes out of it: packed and sealed, whatever the backend is.

What cannot be read (damaged, written by something else, sealed with another key) is counted, and is as if it were not
there: it never fails a request.
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
    """Safe to use from any number of threads."""

    def __init__(self, codec: Codec | None = None) -> None:
        self._codec = codec or PlainCodec()
        self.sealed = not isinstance(
            self._codec, PlainCodec
        )  # whether a server sees nothing of questions and answers
        self.unreadable = 0  # entries that were met and could not be read

    def pack(self, question: Question, entry: CacheEntry, vector: Vector | None) -> PackedEntry:
        """Seal an entry; its vector as 16-bit floats."""
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
        """The entry, or None if it cannot be read."""
        try:
            return CacheEntry.from_bytes(self._codec.open(answer, key))
        except (UnreadableEntry, ValueError) as error:
            self._count(key, error)
            return None

    def both(self, turn: bytes, answer: bytes, key: bytes) -> tuple[str, CacheEntry] | None:
        """The question and the entry, or None if one of them cannot be read."""
        question = self.turn(turn, key)
        entry = None if question is None else self.entry(answer, key)
        return None if question is None or entry is None else (question, entry)

    def candidates(self, found: Iterable[tuple[bytes, bytes, float]]) -> list[Candidate]:
        """What was found near, as keys, kept questions and cosines; without those that cannot be read."""
        opened = [(key, self.turn(turn, key), cosine) for key, turn, cosine in found]
        return [Candidate(key, turn, cosine) for key, turn, cosine in opened if turn is not None]

    def turn(self, turn: bytes, key: bytes) -> str | None:
        """The question, or None if it cannot be read."""
        try:
            return self._codec.open(turn, key).decode()
        except (UnreadableEntry, ValueError) as error:
            self._count(key, error)
            return None

    def vector(self, vector: bytes, key: bytes, dimensions: int) -> Vector | None:
        """The embedding, or None if it cannot be read, has other dimensions, or holds what is not a number."""
        try:
            packed = self._codec.open(vector, key)
        except UnreadableEntry as error:
            self._count(key, error)
            return None
        if len(packed) != 2 * dimensions:
            return None
        found = np.frombuffer(packed, "<f2").astype(np.float32)
        # one that is not finite would spoil the clusters of all others
        return found if np.isfinite(found).all() else None

    def _count(self, key: bytes, error: Exception) -> None:
        if not self.unreadable:
            _log.warning("the response cache holds what cannot be read, such as %s: %s", key.hex(), error)
        self.unreadable += 1
