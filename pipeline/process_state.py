"""Decide whether a process of this machine runs, is stopped or gone, or hangs, by what /proc shows of it.

A process that should answer and is late may be dead, may compute, or may wait for a processor on a busy machine.
`HangJudge` decides from its `ProcessActivity`, and `ProcessPulse` keeps the time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
# Environment variable of all processes that a supervisor has started, whoever their parent is now; see `own_mark`.
SUPERVISOR = "PIPELINE_SUPERVISOR"
# Fields of /proc/PID/stat behind the name; see proc(5).
_STATE, _UTIME, _STIME, _CUTIME, _CSTIME, _STARTTIME = 0, 11, 12, 13, 14, 19
CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# A process that works answers at once. One that is late is hung, unless it computes: then it has longer. Time in which
# it could run and had no processor does not count, up to a bound.
_ANSWER_S = 3.0
_BUSY_ANSWER_S = 15.0
_STARVED_ANSWER_S = 60.0
# Share of a core that a process uses which computes.
_BUSY_SHARE = 0.2
# A process that is not so late is not looked into.
_LOOK_S = 1.0
# Debuggers and profilers stop a process for a moment.
STOPPED_S = 1.0
# A watcher that has not looked for so long was held up itself: what it saw before says nothing.
HELD_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process at one moment.

    Attributes:
        name: Its first 15 characters.
        state: "R" runs, "S" and "D" wait, "T" stopped by a signal, "t" by a debugger.
        cpu_s: Processor time so far, in seconds.
        start: Beginning, in clock ticks since the machine started; with its number this tells it from a later one.
        children_cpu_s: Processor time of its children that have ended and were waited for, and of theirs, in seconds.
    """

    name: str
    state: str
    cpu_s: float
    start: int
    children_cpu_s: float = 0.0

    @classmethod
    def of(cls, pid: int) -> ProcessStat | None:
        """Look at a process. None if it is gone, or only waits to be reaped."""
        stat = cls.read(PROC / str(pid) / "stat")
        return None if stat is None or stat.state in "ZX" else stat

    @classmethod
    def read(cls, file: Path) -> ProcessStat | None:
        """Read the file `stat` of a process or a thread. None if that is gone."""
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name may hold anything, also brackets and blanks.
        before, _, after = text.rpartition(")")
        fields = after.split()
        return cls(
            name=before.partition("(")[2],
            state=fields[_STATE],
            cpu_s=(int(fields[_UTIME]) + int(fields[_STIME])) * CLOCK_TICK_S,
            start=int(fields[_STARTTIME]),
            children_cpu_s=(int(fields[_CUTIME]) + int(fields[_CSTIME])) * CLOCK_TICK_S,
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds it up."""
        return self.state in "Tt"


def boot_id() -> str:
    """Return the kernel's name of this start of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def own_mark() -> str:
    """Return a value of `SUPERVISOR` that no other process of this machine has."""
    stat = ProcessStat.of(os.getpid())
    assert stat is not None, "this process runs"
    return f"{os.getpid()}-{stat.start}-{boot_id()}"


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


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """Activity of a process and its descendants so far.

    Attributes:
        cpu_s: Processor time, in seconds; that of children which have ended stays.
        waited_s: Time in which their threads could run and had no processor, in seconds, added up when they get one.
        works: Whether one of their threads runs, could run, or waits for a disk.
        pressure: Share of the time, 0 to 1, in which some thread of the machine waits for a processor.
    """

    cpu_s: float
    waited_s: float
    works: bool
    pressure: float

    @classmethod
    def of(cls, pid: int, proc: Path = PROC) -> ProcessActivity:
        """Look at a process and its descendants; what is gone counts as nothing."""
        cpu_s = waited_s = 0.0
        works = False
        for folder in _family(proc / str(pid)):
            # One that waits to be reaped has not been added to its parent yet.
            if (stat := ProcessStat.read(folder / "stat")) is not None:
                cpu_s += stat.cpu_s + stat.children_cpu_s
            for thread in _threads(folder):
                waited_s += _waited_s(thread)
                stat = ProcessStat.read(thread / "stat")
                works = works or (stat is not None and stat.state in "RD")
        return cls(cpu_s, waited_s, works, _cpu_pressure(proc))


def _family(process: Path) -> Iterator[Path]:
    """Yield the folders in /proc of a process and its descendants, parents before their children."""
    yield process
    for thread in _threads(process):
        try:
            children = (thread / "children").read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in children:
            yield from _family(process.parent / child)


def _threads(process: Path) -> list[Path]:
    try:
        return [process / "task" / name for name in os.listdir(process / "task")]
    except OSError:
        return []


def _waited_s(thread: Path) -> float:
    """Return the time in which a thread could run and had no processor; 0 where the kernel does not say."""
    try:
        return int((thread / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _cpu_pressure(proc: Path) -> float:
    """Return the pressure on the processors in the last 10 s; where the kernel does not say, as the load suggests."""
    try:
        # some avg10=1.20 avg60=25.75 avg300=43.23 total=365888059
        average = (proc / "pressure/cpu").read_text(encoding="ascii").split()[1]
        return float(average.removeprefix("avg10=")) / 100
    except (OSError, IndexError, ValueError):
        return max(0.0, 1 - (os.cpu_count() or 1) / max(os.getloadavg()[0], 1e-9))


@dataclass(slots=True)
class HangJudge:
    """Decides whether a process that is late with an answer hangs. Pure, without a clock.

    One that sleeps hangs after 3 s, one that works after 15 s. Time in which it waited for a processor does not count,
    but after 60 s it hangs in any case.
    """

    _last: ProcessActivity | None = field(default=None, init=False)
    # Lateness when it was first looked at.
    _since_s: float = field(default=0.0, init=False)
    _used_s: float = field(default=0.0, init=False)
    _waited_s: float = field(default=0.0, init=False)

    def judge(self, late_s: float, activity: ProcessActivity) -> bool:
        """Take in what was seen, and decide.

        Args:
            late_s: How long the answer has been awaited, in seconds.
            activity: Activity of the process so far.
        """
        if self._last is None:
            self._since_s = late_s
        else:
            # Both are sums over processes, which may shrink when one of them ends.
            self._used_s += max(0.0, activity.cpu_s - self._last.cpu_s)
            self._waited_s += max(0.0, activity.waited_s - self._last.waited_s)
        self._last = activity
        looked_s = late_s - self._since_s
        # A wait that goes on has not been added yet.
        waiting_s = activity.pressure * looked_s if activity.works else 0.0
        starved_s = min(looked_s, max(self._waited_s, waiting_s))
        works = activity.works or self._used_s > _BUSY_SHARE * late_s
        most_s = _BUSY_ANSWER_S if works else _ANSWER_S
        return late_s - starved_s > most_s or late_s > _STARVED_ANSWER_S


class ProcessPulse:
    """Judges a process that should answer: it is hung if it is stopped, or by `HangJudge`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # Since when an answer is awaited, by `time.monotonic()`, and what is thought of the process since.
        self._asked_at: float | None = None
        self._judge = HangJudge()
        self._looked = time.monotonic()
        self._stopped_since: float | None = None

    @property
    def awaited(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked_at is not None

    def ask(self) -> None:
        """Note that an answer is awaited from now on."""
        self._asked_at, self._judge = time.monotonic(), HangJudge()

    def hear(self) -> None:
        """Note that it has answered."""
        self._asked_at = None

    def fault(self) -> str | None:
        """Say what is wrong with it, as "is stopped" or "does not answer for 3.2 s"; None if nothing is.

        To be called about once a second or more often.
        """
        now, stat = time.monotonic(), ProcessStat.of(self._pid)
        held_up, self._looked = now - self._looked > HELD_UP_S, now
        if stat is None:
            return None
        if not stat.stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > STOPPED_S:
            return "is stopped"
        if self._asked_at is None:
            return None
        if held_up:
            # The answer may be there, and not have been read.
            self.ask()
            return None
        late_s = now - self._asked_at
        if late_s < _LOOK_S or not self._judge.judge(late_s, ProcessActivity.of(self._pid)):
            return None
        return f"does not answer for {late_s:.1f} s"
