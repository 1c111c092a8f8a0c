"""Whether a process of this machine runs, is stopped or gone, what it used, and whether it counts as hung."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# Fields of /proc/PID/stat behind the name; see proc(5).
_STATE, _UTIME, _STIME, _STARTTIME = 0, 11, 12, 19

# A process that works answers at once. One that is late is hung, unless it computes: then it has longer.
_ANSWER_S = 3.0
_BUSY_ANSWER_S = 15.0
_BUSY_SHARE = 0.2  # of a core
_STOPPED_S = 1.0  # debuggers and profilers stop a process for a moment


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process at one moment.

    Attributes:
        name: Its first 15 characters.
        state: "R" runs, "S" and "D" wait, "T" stopped by a signal, "t" by a debugger.
        cpu_s: Processor time so far, in seconds.
        start: When it began; with its number this tells it from a later one.
    """

    name: str
    state: str
    cpu_s: float
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessStat | None:
        """Look at a process. None if it is gone, or only waits to be reaped."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name may hold anything, also brackets and blanks.
        before, _, after = text.rpartition(")")
        fields = after.split()
        if fields[_STATE] in "ZX":
            return None
        ticks = int(fields[_UTIME]) + int(fields[_STIME])
        return cls(
            before.partition("(")[2],
            fields[_STATE],
            ticks / os.sysconf("SC_CLK_TCK"),
            int(fields[_STARTTIME]),
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds it up."""
        return self.state in "Tt"


def exit_reason(code: int) -> str:
    """Say how a process ended.

    Args:
        code: Its exit code; a signal's number is negative, as `subprocess` has it, or added to 128, as shells do.

    >>> exit_reason(3), exit_reason(-9), exit_reason(137)
    ('ended by itself with exit code 3', 'was killed by SIGKILL', 'was killed by SIGKILL')
    """
    number = -code if code < 0 else code - 128
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"ended by itself with exit code {code}"


class ProcessPulse:
    """Judges a process that should answer: it is hung if it is stopped, or late while it does not compute."""

    def __init__(self, pid: int) -> None:
        """
        Args:
            pid: of the process.
        """
        self._pid = pid
        # Since when an answer is awaited, by `time.monotonic()`, and what the process had used by then.
        self._asked: float | None = None
        self._cpu_s = 0.0
        self._stopped_since: float | None = None

    @property
    def awaited(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    def ask(self) -> None:
        """Note that an answer is awaited from now on."""
        self._asked, self._cpu_s = time.monotonic(), self._used_s()

    def hear(self) -> None:
        """Note that it has answered."""
        self._asked = None

    def fault(self) -> str | None:
        """Say what is wrong with it, as "is stopped" or "does not answer for 3.2 s"; None if nothing is."""
        now, stat = time.monotonic(), ProcessStat.of(self._pid)
        if stat is None:
            return None
        if not stat.stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > _STOPPED_S:
            return "is stopped"
        if self._asked is None:
            return None
        late_s = now - self._asked
        if late_s <= _ANSWER_S:
            return None
        busy = self._used_s() - self._cpu_s > _BUSY_SHARE * late_s
        return None if busy and late_s <= _BUSY_ANSWER_S else f"does not answer for {late_s:.1f} s"

    def _used_s(self) -> float:
        """Processor time so far, of the process and of those that it has started."""
        try:
            children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        except OSError:
            children = []
        family = map(ProcessStat.of, (self._pid, *map(int, children)))
        return sum(one.cpu_s for one in family if one is not None)
