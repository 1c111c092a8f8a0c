"""Rows that are appended one by one and read as one array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_FIRST = 16


class Rows:
    """An array [rows, columns] that doubles its room when it is full; adding a row costs constant time on average."""

    __slots__ = ("_room", "array")

    def __init__(self, columns: int | None, dtype: DTypeLike) -> None:
        """`columns` None makes it one-dimensional."""
        self._room: NDArray[Any] = np.empty((_FIRST,) if columns is None else (_FIRST, columns), dtype)
        self.array = self._room[:0]  # all rows: a view, until more are added

    def __len__(self) -> int:
        return len(self.array)

    def extend(self, rows: NDArray[Any]) -> None:
        """Append."""
        count = len(self.array)
        end = count + len(rows)
        if end > len(self._room):
            room = np.empty((max(end, 2 * len(self._room)), *self._room.shape[1:]), self._room.dtype)
            room[:count] = self.array
            self._room = room
        self._room[count:end] = rows
        self.array = self._room[:end]

    def clear(self) -> None:
        """Forget the rows and keep the room."""
        self.array = self._room[:0]
