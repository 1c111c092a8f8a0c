"""Backends that keep entries as bytes, in a file or in a server: the part that they share.

Entries are encrypted if there is a key. Those that cannot be read (damaged, written by something else, encrypted with
another key) are counted and treated as misses: they never fail a request.

Of a server that does not answer, the circuit breaker asks nothing for a while after a failure, and then one request
tries: otherwise every request would wait for the same timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pipeline.cache.backend import BackendDown, Candidate, Capacity, EntryFilter, Vector
from pipeline.cache.encryption import Codec, PlainCodec, UnreadableEntry
from pipeline.cache.entry import CacheEntry
from pipeline.cache.key import Question

_FIRST_S = 0.5
_LONGEST_S = 15.0


class ServerUnreachable(BackendDown):
    """The server could not be reached, or took too long."""


class CircuitBreaker:
    """Open for 0.5 s after the first failure, twice as long after each further one, 15 s at most; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Failures in a row.
        self._failures = 0
        self._until = 0.0
        self._why = ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a request to the server.

        Raises:
            BackendDown: at once while the breaker is open. A ServerUnreachable that the block raises opens it.
        """
        # Requests that are under way together all fail: they count as one.
        trial = self._failures > 0
        if trial:
            # One request tries when the pause is over; the others are refused until it has an answer.
            with self._lock:
                now = self._clock()
                if now < self._until:
                    raise BackendDown(f"{self._why}; asked again in {self._until - now:.1f} s")
                self._until = now + self._length()
        try:
            yield
        except ServerUnreachable as error:
            with self._lock:
                if trial or self._clock() >= self._until:
                    self._failures += 1
                    self._why = str(error)
                    self._until = self._clock() + self._length()
            raise
        except Exception:
            # The server refused, or the block failed after its answer: it is there.
            self._close()
            raise
        self._close()

    def _close(self) -> None:
        self._failures, self._until = 0, 0.0

    def _length(self) -> float:
        return float(min(_FIRST_S * 2 ** max(0, self._failures - 1), _LONGEST_S))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """An entry as bytes. `created` and `expires` are s since the epoch."""

    key: bytes
    scope: bytes
    engine: bytes
    tenant: bytes
    turn: bytes
    answer: bytes
    vector: bytes | None
    created: float
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

    def candidates(self, rows: Iterable[tuple[bytes, bytes, float]]) -> list[Candidate]:
        """Read the questions of (key, packed question, cosine); those that cannot be read are left out."""
        opened = [(key, self.turn(turn, key), cosine) for key, turn, cosine in rows]
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
        embedding = np.frombuffer(packed, "<f2").astype(np.float32)
        # One that is not finite would spoil the index of all others.
        return embedding if np.isfinite(embedding).all() else None

    def _count(self, key: bytes, error: Exception) -> None:
        if not self.unreadable:
            _log.warning("the response cache holds what cannot be read, such as %s: %s", key.hex(), error)
        self.unreadable += 1


class PackedBackend(ABC):
    """The part of `pipeline.cache.backend.Backend` that needs no storage of its own."""

    def __init__(self, capacity: Capacity | None, codec: Codec | None, *, flush_every: int = 64) -> None:
        """
        Args:
            capacity: None: the defaults of `Capacity`.
            codec: encrypts entries; None: they are kept in the clear.
            flush_every: access times that are written together.
        """
        self._capacity = capacity or Capacity()
        self._codec = EntryCodec(codec)
        self._access_times = AccessTimes(flush_every)

    def get(self, key: bytes, now: float) -> CacheEntry | None:
        answer = self._answer(key)
        entry = None if answer is None else self._codec.entry(answer, key)
        if entry is None or entry.expires <= now:
            return None
        if self._access_times.note(key, now):
            self._flush()
        return entry

    def put(self, question: Question, entry: CacheEntry, vector: Vector | None = None) -> None:
        packed = self._codec.pack(question, entry, vector)
        if packed.size > self._capacity.bytes:
            self.remove([packed.key])
        else:
            self._store(packed, vector)

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> int:
        """See `Backend`."""

    def unreadable(self) -> int:
        return self._codec.unreadable

    @abstractmethod
    def _answer(self, key: bytes) -> bytes | None:
        """Return the packed answer of a key."""

    @abstractmethod
    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        """Store an entry that is not larger than the capacity; `vector` is its embedding before it was packed."""

    @abstractmethod
    def _flush(self) -> None:
        """Write the access times that were noted."""


class AccessTimes:
    """When entries were last used, collected until so many are written together: a hit does not write. Thread-safe."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._noted: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def note(self, key: bytes, now: float) -> bool:
        """Note that an entry is used now (s since the epoch). Returns whether it is time to write."""
        with self._lock:
            self._noted[key] = now
            return len(self._noted) >= self._together

    def take(self) -> dict[bytes, float]:
        """Return what was noted since the last call: key -> s since the epoch."""
        with self._lock:
            noted, self._noted = self._noted, {}
            return noted


def sql_where(which: EntryFilter, mark: str) -> tuple[str, list[bytes | float]]:
    """Write a filter as a condition of SQL. Returns the text, in which `mark` stands for a value, and the values.

    >>> sql_where(EntryFilter(tenant=b"t", before=1.5), "?")
    ('tenant = ? AND created < ?', [b't', 1.5])
    """
    ids = which.ids()
    terms = [f"{name} = {mark}" for name in ids]
    values: list[bytes | float] = list(ids.values())
    if which.before is not None:
        terms.append(f"created < {mark}")
        values.append(which.before)
    return " AND ".join(terms) or "true", values
