"""Processes of this machine: started, below a guard where nothing may outlive this one; their ports, memory, family."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import psutil

from pipeline.machine import process_guard

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STUB = "triton_python_backend_stub"


def start_process(
    command: Sequence[str],
    output: BinaryIO,
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    inherit: Sequence[int] = (),
    umask: int = 0o077,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with variables besides those of this process; it keeps descriptors."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment},
        pass_fds=inherit, start_new_session=True, umask=umask,
    )  # fmt: skip


def start_guarded(
    command: Sequence[str],
    guarded: process_guard.GuardedProcess,
    output: BinaryIO,
    environment: Mapping[str, str],
    *,
    umask: int = 0o077,
) -> subprocess.Popen[bytes]:
    """Start a process below a guard, which ends it when this process is gone or closes the guard's standard input.

    The mark of `guarded` is added to the environment; see `start_process`.
    """
    guard = [sys.executable, "-I", process_guard.__file__, json.dumps(asdict(guarded))]
    marked = {**environment, process_guard.MARK: guarded.mark}
    return start_process([*guard, *command], output, marked, stdin=subprocess.PIPE, umask=umask)


def listening(pid: int) -> set[int]:
    """List the TCP ports that a process listens on; empty if it has ended, or belongs to another user."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when the thread that started it is gone; false if `parent` is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


@dataclass(frozen=True, slots=True)
class DeploymentProcess:
    """One process.

    Attributes:
        name: Model of a Python stub, verb of a `pipeline` command, `worker` of a gateway that has several; else the
            program.
    """

    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process, in MiB: what it has allocated, and its share of memory that several map."""

    anonymous: float
    shared: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.anonymous + self.shared

    @classmethod
    def of(cls, pid: int) -> ProcessMemory:
        """Read it from /proc. Raises OSError if the process is gone, or another user's."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
        kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
        return cls(kib["Anonymous"] / 1024, kib["Pss_Shmem"] / 1024)


_HELPERS = ("front", "grammar_server", "text_server")


def processes_below(pid: int) -> Iterator[DeploymentProcess]:
    """Yield a process and all that descend from it; what ends meanwhile is left out."""
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
            return "worker" if "--worker" in command else word
        if word.endswith("process_guard.py"):
            return "guard"
        # Module and script that the gateway and the engine run for each model, and their workers.
        if (name := word.rpartition(".")[2]) in _HELPERS or (name := Path(word).stem) in _HELPERS:
            return name
    return program
