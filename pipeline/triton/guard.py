"""Stands between `pipeline` and a server: when `pipeline` is gone, however it went, the server goes too.

    python guard.py STOP_DEADLINE_S STAGE SHARED_MEMORY_PREFIX COMMAND…

Standard input is a pipe that nobody writes to; its end says that the parent died, even by kill -9. SIGTERM and SIGINT
say the same politely. Then the command gets SIGTERM, and SIGKILL after the deadline. Whatever is left of it is killed
(Triton's stubs are processes of their own), and the stage and the shared memory are removed. Should the guard itself
be killed, the kernel kills the command.

Needs the standard library only, and is run as a file: `pipeline` need not be importable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 0.1


def main(stop_deadline_s: float, stage: Path, shared_memory_prefix: str, command: list[str]) -> int:
    """Run the command until it ends or is to end; its exit code, or 128 + signal."""
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_die_with_parent,
    )
    try:
        while server.poll() is None and not stopping:
            stopping = _parent_is_gone()
        if server.poll() is None:
            _end(server, stop_deadline_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # stubs that outlived the server
        server.wait()
        remove_traces(stage, shared_memory_prefix)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def remove_traces(stage: Path, shared_memory_prefix: str) -> None:
    """Remove what a server that has ended leaves on disk and in memory."""
    shutil.rmtree(stage, ignore_errors=True)
    for region in Path("/dev/shm").glob(f"{shared_memory_prefix}*"):
        region.unlink(missing_ok=True)


def _end(server: subprocess.Popen[bytes], deadline_s: float) -> None:
    server.terminate()
    deadline = time.monotonic() + deadline_s
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)


def _parent_is_gone() -> bool:
    """Waits a moment for the end of standard input."""
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
