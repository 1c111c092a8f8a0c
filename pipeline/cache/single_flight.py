"""One generation for all equal requests that run at the same time.

Whoever comes first takes off; who asks the same meanwhile boards, and sees every chunk from the beginning. The
generation goes on as long as one passenger is left, and ends early when the last one leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipeline.client import Cancelled, Chunk, Stream


class Flight:
    """An answer that is being generated, for threads.

    There is no thread of its own: whichever passenger needs the next chunk reads it from the model for all of them.
    """

    def __init__(self, stream: Stream, landed: Callable[[Flight], None]) -> None:
        """`landed` is called once, when the answer is complete, before anybody sees its end."""
        self.stream = stream
        self.chunks: list[Chunk] = []
        self.times: list[float] = []  # of arrival, on the clock of `perf_counter`
        self.began = time.perf_counter()
        self.error: BaseException | None = None
        self.over = False
        self._landed = landed
        self._passengers = 0
        self._entered = False
        self._reading = threading.Lock()  # held by the passenger who reads for all
        self._changed = threading.Condition()

    @property
    def passengers(self) -> int:
        """How many wait for it."""
        return self._passengers

    def board(self) -> bool:
        """Join; False if it is too late."""
        with self._changed:
            if self.over and self.error is not None:
                return False
            self._passengers += 1
            return True

    def leave(self) -> bool:
        """Whether nobody is left: the generation then ends, on the server too."""
        with self._changed:
            self._passengers -= 1
            if self._passengers:
                return False
            if not self.over:
                self.over, self.error = True, Cancelled("everybody left")
        with self._reading:
            self._exit()
        return True

    def read(self, at: int) -> Chunk | None:
        """Chunk number `at`, waiting for it; None after the last one. Raises what the generation raised."""
        while True:
            if at < len(self.chunks):
                return self.chunks[at]
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            if self._reading.acquire(blocking=False):
                try:
                    if at >= len(self.chunks) and not self.over:
                        self._advance()
                finally:
                    self._reading.release()
                    with self._changed:
                        self._changed.notify_all()
            else:
                with self._changed:
                    if at >= len(self.chunks) and not self.over:
                        self._changed.wait(0.05)

    def _advance(self) -> None:
        try:
            if not self._entered:
                self.stream.__enter__()
                self._entered = True
            self.chunks.append(next(self.stream))
            self.times.append(time.perf_counter())
        except StopIteration:
            self._landed(self)
            self.over = True
            self._exit()
        except BaseException as error:
            self.error, self.over = error, True
            self._exit()

    def _exit(self) -> None:
        if self._entered:
            self._entered = False
            self.stream.__exit__(None, None, None)


class Flights:
    """Those that are under way, by the key of their question."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}
        self._lock = threading.Lock()

    def join(self, key: bytes, make: Callable[[], Flight]) -> tuple[Flight, bool]:
        """The flight of a key, boarded; and whether it has just been made."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None and flight.board():
                return flight, False
            flight = self._flights[key] = make()
            flight.board()
            return flight, True

    def leave(self, key: bytes, flight: Flight) -> None:
        """Leave; a flight without passengers, or that is over, takes nobody on any more."""
        with self._lock:
            if flight.over and self._flights.get(key) is flight:
                del self._flights[key]
        if flight.leave():
            with self._lock:
                if self._flights.get(key) is flight:
                    del self._flights[key]
