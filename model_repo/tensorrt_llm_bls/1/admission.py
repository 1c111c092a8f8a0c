"""How many answers may be open at once, where each is many calls of the engines.

An engine that takes so many requests and refuses the next would refuse a round in the middle of an answer. As an answer
has one call of an engine under way at a time, as many answers as the engine takes requests are never refused there;
the answer after them is, before it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.refusal import Refused


class Admission:
    """Safe to use from any thread."""

    def __init__(self, most: int | None) -> None:
        """`most`: answers that may run and wait; None is no limit."""
        self._most = most
        self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold the place of one answer.

        Raises:
            Refused: all are taken; in Triton's own words for a full queue.
        """
        with self._lock:
            if self._most is not None and self._open >= self._most:
                raise Refused(f"Exceeds maximum queue size: {self._open} requests run or wait")
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
