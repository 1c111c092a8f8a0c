"""Stands between `pipeline` and a server: when `pipeline` is gone, however it went, the server goes too.

    python process_guard.py '{"stop_deadline_s": 10, "stage": "/tmp/…", "mark": "…", "cleanup": []}' COMMAND…

Standard input is a pipe that nobody writes to; its end says that the parent died, even by kill -9. SIGTERM and SIGINT
say the same politely. Then the command gets SIGTERM, and SIGKILL after the deadline. Whatever is left of it is killed:
Triton's stubs, the ranks that mpirun put into groups of their own, and workers that MPI started in sessions of their
own are all known by the mark in their environment. The cleanup command is run, and the stage and the shared memory are
removed. Should the guard itself be killed, the kernel kills the command.

Nobody else may read what the command makes: it has umask 077, and a filter of system calls against Boost, which gives
each region of shared memory mode 0644 whatever the umask (`shared_memory_object` of Boost.Interprocess calls fchmod).

Needs the standard library only, and is run as a file: `pipeline` need not be importable.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# Environment variable of all processes of one start.
MARK = "PIPELINE_TRITON_START"
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
# linux/seccomp.h
_SECCOMP_MODE_FILTER = 2
# Machine -> AUDIT_ARCH_… of linux/audit.h, and the number of fchmod.
_FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
_UMASK, _OPEN_TO_ALL = 0o077, 0o644
# Exit code of a shell for it.
_CANNOT_BE_RUN = 127
_POLL_S = 0.1
_CLEANUP_DEADLINE_S = 30.0
_KILLING_DEADLINE_S = 10.0
# Time that a guard may take after the stop deadline.
AFTERWARDS_S = _KILLING_DEADLINE_S + _CLEANUP_DEADLINE_S + 5


@dataclass(frozen=True, slots=True)
class GuardedProcess:
    """A guard's task.

    Attributes:
        stop_deadline_s: Time between SIGTERM and SIGKILL.
        stage: Folder to remove.
        mark: Value of MARK; regions of shared memory begin with it.
        cleanup: Command to run at the end.
        folder: Folder to remove, too, if the parent did not live to do so.
    """

    stop_deadline_s: float
    stage: str
    mark: str
    cleanup: Sequence[str] = ()
    folder: str = ""


def main(guarded: GuardedProcess, command: list[str]) -> int:
    """Run the command until it ends or is to end. Returns its exit code, or 128 + signal."""
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    parent = os.getppid()
    # Processes that lose their parent become this one's, to be reaped.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_prepare, umask=_UMASK
        )
    except OSError as error:
        # Output that cannot be written is no reason to fail otherwise.
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), f"{command[0]} cannot be run: {error.strerror}\n".encode())
        remove_traces(guarded)
        return _CANNOT_BE_RUN
    try:
        while server.poll() is None and not stopping:
            # Not assigned otherwise: a signal may come meanwhile.
            if _parent_is_gone():
                stopping = True
        if server.poll() is None:
            _end(server, guarded.stop_deadline_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Processes that outlived the server.
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        remove_traces(guarded)
        if guarded.folder and os.getppid() != parent:
            shutil.rmtree(guarded.folder, ignore_errors=True)
        _reap()
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def remove_traces(guarded: GuardedProcess) -> None:
    """Remove the remains of a server that has ended: processes, a container, files, shared memory."""
    kill_marked(guarded.mark)
    if guarded.cleanup:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                guarded.cleanup, timeout=_CLEANUP_DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    shutil.rmtree(guarded.stage, ignore_errors=True)
    for region in Path("/dev/shm").glob(f"{guarded.mark}*"):
        region.unlink(missing_ok=True)


def kill_marked(mark: str, variable: str = MARK) -> None:
    """Kill all processes with the mark but this one, and those that they start meanwhile."""
    deadline = time.monotonic() + _KILLING_DEADLINE_S
    while (pids := marked(mark, variable)) and time.monotonic() < deadline:
        for number in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(_POLL_S / 4)


def marked(mark: str, variable: str = MARK) -> list[int]:
    """List processes with the mark in their environment, but this one; not those that only wait to be reaped."""
    entry = f"{variable}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and entry in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


def _end(server: subprocess.Popen[bytes], deadline_s: float) -> None:
    server.terminate()
    deadline = time.monotonic() + deadline_s
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)


def _reap() -> None:
    """Reap processes that became children of this one."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parent_is_gone() -> bool:
    """Wait a moment for the end of standard input. Returns whether it came."""
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _prepare() -> None:
    """Have the kernel end this process with its parent, and let it open no file to other users."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    program = _fchmod_filter(platform.machine())
    if program:
        text = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: the number of instructions, and where they are.
        whole = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text))
        # A filter needs it of a process without privileges.
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, whole, 0, 0)


def _fchmod_filter(machine: str) -> bytes:
    """Write a filter of system calls in which fchmod(file, 0644) does nothing, and says that it did.

    Args:
        machine: As `platform.machine` has it.

    Returns:
        Instructions of the kernel's BPF (linux/filter.h) over struct seccomp_data; none for an unknown machine.
    """
    if machine not in _FCHMOD:
        return b""
    architecture, number = _FCHMOD[machine]
    load, jump_if_equal, leave = 0x20, 0x15, 0x06
    allow, errno_0 = 0x7FFF0000, 0x00050000
    return b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 4),  # seccomp_data.arch
            (jump_if_equal, 0, 5, architecture),
            (load, 0, 0, 0),  # seccomp_data.nr
            (jump_if_equal, 0, 3, number),
            (load, 0, 0, 24),  # seccomp_data.args[1]
            (jump_if_equal, 0, 1, _OPEN_TO_ALL),
            (leave, 0, 0, errno_0),
            (leave, 0, 0, allow),
        )
    )


if __name__ == "__main__":
    sys.exit(main(GuardedProcess(**json.loads(sys.argv[1])), sys.argv[2:]))
