"""A line of progress with the time left: rewritten in place on a terminal, every ten seconds otherwise."""

import sys
import time


class Progress:
    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._interval_s = 0.2 if sys.stderr.isatty() else 10.0

    def advance(self, note: str = "", amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        is_last = self._done >= self._total
        if is_last or now - self._shown >= self._interval_s:
            self._shown = now
            self._show(note, elapsed_s=now - self._start, is_last=is_last)

    def _show(self, note: str, *, elapsed_s: float, is_last: bool) -> None:
        left_s = elapsed_s / self._done * (self._total - self._done)
        time_text = f"took {elapsed_s:.0f} s" if is_last else f"{left_s:.0f} s left"
        line = f"{self._label}: {self._done}/{self._total}, {time_text}  {note}"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="\n" if is_last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr)
