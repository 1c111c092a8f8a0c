"""Processes of this machine, as proc(5) shows them: whether they run, are stopped or gone, what they used and hold."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STUB = "triton_python_backend_stub"
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


def listening(pid: int) -> set[int]:
    """The TCP ports that a process listens on; empty if it has ended, or belongs to another user."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when the thread that started it is gone, however that went.

    Args:
        parent: Process that is to be the parent.

    Returns:
        False if it is gone already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


@dataclass(frozen=True, slots=True)
class DeploymentProcess:
    """One process. `name`: the model of a Python stub; the verb of a `pipeline` command; else the program."""

    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What one process holds, MiB: what it has allocated, and its share of memory that several map."""

    anonymous: float
    shared: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.anonymous + self.shared

    @classmethod
    def of(cls, pid: int) -> ProcessMemory:
        """Read it from /proc.

        Args:
            pid: of a process of this user.

        Raises:
            OSError: it is gone, or another user's.
        """
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
        kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
        return cls(kib["Anonymous"] / 1024, kib["Pss_Shmem"] / 1024)


def processes_below(pid: int) -> Iterator[DeploymentProcess]:
    """Yield a process and all that descend from it; what ends meanwhile is left out.

    Args:
        pid: of the first.
    """
    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command:
            yield DeploymentProcess(process.pid, _name(command))


def _name(command: list[str]) -> str:
    program = Path(command[0]).name
    if program == _STUB and len(command) > 1:
        # PROGRAM .../<model>/<version>/model.py …
        return Path(command[1]).parents[1].name
    for before, word in pairwise(command):
        if before == "pipeline.cli.main" or Path(before).name == "pipeline":
            return word
        if word.endswith("process_guard.py"):
            return "guard"
    return program
