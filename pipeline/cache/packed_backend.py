"""What all backends have in common that keep entries as bytes, in a file or in a server."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

from pipeline.cache.backend import Capacity, EntryFilter, Vector
from pipeline.cache.codec import EntryCodec, PackedEntry
from pipeline.cache.encryption import Codec
from pipeline.cache.entry import CacheEntry
from pipeline.cache.key import Question


class PackedBackend(ABC):
    """The part of `pipeline.cache.backend.Backend` that needs no storage of its own."""

    def __init__(self, capacity: Capacity | None, codec: Codec | None, *, flush_every: int = 64) -> None:
        """`flush_every`: access times that are written together."""
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
    """When entries were last used, collected until they are written together: a hit does not write. Thread-safe."""

    def __init__(self, together: int) -> None:
        """`together`: how many are written together."""
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
