"""Processes of a deployment on this machine, by what they are, and the memory that each holds. Linux only.

for process in processes_below(pid):
    process.name, ProcessMemory.of(process.pid)      # "tensorrt_llm", ProcessMemory(anonymous=120.4, shared=1.1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

_STUB = "triton_python_backend_stub"


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
