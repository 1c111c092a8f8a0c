"""What all backends have in common that keep entries packed, in a file or in a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from pipeline.cache.access_times import Uses
from pipeline.cache.backend import Capacity, Vector
from pipeline.cache.codec import Packed, Vault
from pipeline.cache.encryption import Codec
from pipeline.cache.entry import Entry
from pipeline.cache.key import Question


class PackedBackend(ABC):
    """A part of `pipeline.cache.backend.Backend`."""

    def __init__(self, capacity: Capacity | None, codec: Codec | None, *, uses_together: int = 64) -> None:
        """`uses_together`: how many uses are written at a time."""
        self._capacity = capacity or Capacity()
        self._vault = Vault(codec)
        self._uses = Uses(uses_together)

    def get(self, key: bytes, now: float) -> Entry | None:
        answer = self._answer(key)
        entry = None if answer is None else self._vault.entry(answer, key)
        if entry is None or entry.expires <= now:
            return None
        if self._uses.note(key, now):
            self._flush()
        return entry

    def put(self, question: Question, entry: Entry, vector: Vector | None = None) -> None:
        packed = self._vault.pack(question, entry, vector)
        if packed.size > self._capacity.bytes:
            self.remove([packed.key])
        else:
            self._store(packed, vector)

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> int:
        """See `Backend`."""

    def unreadable(self) -> int:
        return self._vault.unreadable

    @abstractmethod
    def _answer(self, key: bytes) -> bytes | None:
        """The kept answer of this very key."""

    @abstractmethod
    def _store(self, packed: Packed, vector: Vector | None) -> None:
        """Keep an entry that is not larger than the capacity; `vector` as it was before it was packed."""

    @abstractmethod
    def _flush(self) -> None:
        """Write the uses that were noted."""
