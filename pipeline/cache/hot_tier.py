"""Answers in the memory of this process: what was used last, in front of a backend that is slower."""

from __future__ import annotations

import threading

from pipeline.cache.entry import Entry


class Recent:
    """A bounded table from key to entry; what was used longest ago goes first."""

    def __init__(self, entries: int = 4096, max_bytes: int = 64 * 2**20) -> None:
        self._most, self._max_bytes = entries, max_bytes
        self._bytes = 0
        self._table: dict[bytes, Entry] = {}  # in the order of use
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: bytes, now: float) -> Entry | None:
        """The entry, unless it has expired."""
        with self._lock:
            entry = self._table.pop(key, None)
            if entry is None:
                return None
            if entry.expires <= now:
                self._bytes -= len(entry.raw)
                return None
            self._table[key] = entry
            return entry

    def put(self, key: bytes, entry: Entry) -> None:
        """Keep an entry; one that is larger than all of this may hold is not kept."""
        with self._lock:
            self._drop(key)
            self._table[key] = entry
            self._bytes += len(entry.raw)
            while self._table and (len(self._table) > self._most or self._bytes > self._max_bytes):
                self._drop(next(iter(self._table)))

    def remove(self, key: bytes) -> None:
        """Forget one."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._table.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._table.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.raw)
