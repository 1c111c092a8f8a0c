"""What all backends have in common that keep entries packed, in a file or in a server."""

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
    """A part of `pipeline.cache.backend.Backend`."""

    def __init__(self, capacity: Capacity | None, codec: Codec | None, *, flush_every: int = 64) -> None:
        """`flush_every`: how many uses are written at a time."""
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
        """The kept answer of this very key."""

    @abstractmethod
    def _store(self, packed: PackedEntry, vector: Vector | None) -> None:
        """Keep an entry that is not larger than the capacity; `vector` as it was before it was packed."""

    @abstractmethod
    def _flush(self) -> None:
        """Write the uses that were noted."""


class AccessTimes:
    """Safe to use from any number of threads."""

    def __init__(self, together: int) -> None:
        """`together`: how many are written at a time."""
        self._together = together
        self._noted: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def note(self, key: bytes, now: float) -> bool:
        """Whether they are to be written now."""
        with self._lock:
            self._noted[key] = now
            return len(self._noted) >= self._together

    def take(self) -> dict[bytes, float]:
        """What was noted since the last time: key -> s since the epoch."""
        with self._lock:
            noted, self._noted = self._noted, {}
            return noted


def sql_where(which: EntryFilter, mark: str) -> tuple[str, list[bytes | float]]:
    """The text and its values; `mark` stands for a value.

    >>> condition_of(Which(tenant=b"t", before=1.5), "?")
    ('tenant = ? AND created < ?', [b't', 1.5])
    """
    ids = which.ids()
    terms = [f"{name} = {mark}" for name in ids]
    values: list[bytes | float] = list(ids.values())
    if which.before is not None:
        terms.append(f"created < {mark}")
        values.append(which.before)
    return " AND ".join(terms) or "true", values
