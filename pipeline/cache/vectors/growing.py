"""Rows that are appended one by one and read as one array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_FIRST = 16


class Rows:
    """An array [rows, columns] that doubles its room when it is full; adding a row costs constant time on average."""

    __slots__ = ("_count", "_room")

    def __init__(self, columns: int | None, dtype: DTypeLike) -> None:
        """`columns` None makes it one-dimensional."""
        self._room: NDArray[Any] = np.empty((_FIRST,) if columns is None else (_FIRST, columns), dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def array(self) -> NDArray[Any]:
        """All rows, without a copy."""
        return self._room[: self._count]

    def extend(self, rows: NDArray[Any]) -> None:
        """Append."""
        end = self._count + len(rows)
        if end > len(self._room):
            room = np.empty((max(end, 2 * len(self._room)), *self._room.shape[1:]), self._room.dtype)
            room[: self._count] = self.array
            self._room = room
        self._room[self._count : end] = rows
        self._count = end

    def clear(self) -> None:
        """Forget the rows and keep the room."""
        self._count = 0
