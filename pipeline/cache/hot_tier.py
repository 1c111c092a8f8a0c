"""Answers in the memory of one process."""

from __future__ import annotations

import threading

from pipeline.cache.entry import CacheEntry


class HotTier:
    """Answers in the memory of this process, in front of a slower backend: a bounded LRU table; thread-safe."""

    def __init__(self, entries: int = 4096, max_bytes: int = 64 * 2**20) -> None:
        self._most, self._max_bytes = entries, max_bytes
        self._bytes = 0
        self._table: dict[bytes, CacheEntry] = {}  # in the order of use
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: bytes, now: float) -> CacheEntry | None:
        """Return the entry of a key, unless it has expired at `now` (s since the epoch)."""
        with self._lock:
            entry = self._table.pop(key, None)
            if entry is None:
                return None
            if entry.expires <= now:
                self._bytes -= len(entry.raw)
                return None
            self._table[key] = entry
            return entry

    def put(self, key: bytes, entry: CacheEntry) -> None:
        """Hold an entry, unless it is larger than the whole table may be."""
        with self._lock:
            self._drop(key)
            self._table[key] = entry
            self._bytes += len(entry.raw)
            while self._table and (len(self._table) > self._most or self._bytes > self._max_bytes):
                self._drop(next(iter(self._table)))

    def remove(self, key: bytes) -> None:
        """Drop one entry."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._table.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._table.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.raw)
