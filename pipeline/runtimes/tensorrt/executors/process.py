"""One process of a builder: everything it prints goes to a log file, and nothing of it outlives this process.

The log file is the builder's standard output, and it is locked as long as anything of the builder has it open: whoever
comes next, after a builder that was killed with its parent, waits at the lock until the last of it is gone. The guard
(`pipeline.machine.process_guard`) ends the builder when this process is gone, however it went.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import StageError
from pipeline.machine import process_guard

_POLL_S = 0.1
_STOP_DEADLINE_S = 10.0  # between SIGTERM and SIGKILL
_PREDECESSOR_S = 90.0  # a killed builder's guard has so long to end it
_LINE_ENDS = re.compile(rb"[\r\n]+")  # progress bars return the carriage only


@dataclass(frozen=True, slots=True)
class BuilderProcess:
    """Command of a builder, and its surroundings."""

    command: Sequence[str]
    folder: Path  # working directory
    environment: Mapping[str, str]
    cleanup: Sequence[str] = ()  # a command that removes what it may leave


@contextlib.contextmanager
def held_log(path: Path) -> Iterator[BinaryIO]:
    """The log file, empty, for the one builder that may write to it.

    Raises:
        StageError: An earlier builder does not end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        deadline = time.monotonic() + _PREDECESSOR_S
        while not _lock(log):
            if time.monotonic() > deadline:
                raise StageError(f"an earlier builder does not end; see which process has {path} open")
            time.sleep(_POLL_S)
        log.truncate(0)
        yield log


def run(
    launch: BuilderProcess,
    log: BinaryIO,
    *,
    deadline_s: float | None,
    on_line: Callable[[str], None],
    tick: Callable[[], None],
) -> int:
    """Run it to its end; its exit code, or 128 + signal. `on_line` gets each line, `tick` is called all the while.

    Raises:
        StageError: It was ended because it took longer than the deadline.
    """
    guarded = process_guard.GuardedProcess(
        _STOP_DEADLINE_S,
        stage=str(launch.folder / "nothing"),
        mark=f"pipeline-build-{secrets.token_hex(6)}",
        cleanup=list(launch.cleanup),
    )
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-I", process_guard.__file__, json.dumps(asdict(guarded)), *launch.command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=launch.folder,
        env={**launch.environment, process_guard.MARK: guarded.mark},
        start_new_session=True,
    )
    try:
        with Path(log.name).open("rb") as read:
            lines = _Lines(read)
            while (code := process.poll()) is None:
                for line in lines.new():
                    on_line(line)
                tick()
                if deadline_s is not None and time.monotonic() - started > deadline_s:
                    raise StageError(f"{launch.command[0]} was ended: it took longer than {deadline_s:g} s")
                time.sleep(_POLL_S)
            for line in (*lines.new(), *lines.rest()):
                on_line(line)
            return code
    finally:
        _end(process, guarded)


def _end(process: subprocess.Popen[bytes], guarded: process_guard.GuardedProcess) -> None:
    assert process.stdin is not None, "it was started with a pipe"
    process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_DEADLINE_S + 60)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then kills the builder
        process.wait()
    if process.returncode < 0:  # it was killed, and could not clean up
        process_guard.remove_traces(guarded)


def _lock(log: BinaryIO) -> bool:
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Lines:
    """Reads a file that grows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = b""

    def new(self) -> Iterator[str]:
        *whole, self._left = _LINE_ENDS.split(self._left + self._file.read())
        yield from (line.decode(errors="replace") for line in whole)

    def rest(self) -> Iterator[str]:
        if self._left:
            yield self._left.decode(errors="replace")
        self._left = b""
