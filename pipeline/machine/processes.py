"""Processes of this machine, as proc(5) shows them: whether they run, are stopped or gone, what they used."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STATE, _UTIME, _STIME, _STARTTIME = 0, 11, 12, 19  # fields of /proc/PID/stat behind the name


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


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when the thread that started it is gone, however that went.

    Args:
        parent: Process that is to be the parent.

    Returns:
        False if it is gone already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
