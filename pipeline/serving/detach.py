"""Start a supervisor as a process of its own, which outlives the terminal and the command that started it.

Its output goes to `<store>/logs/<name>/serve.log`. Its record, that log and its exit code show whether it is ready, or
why it is not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ServerError, UserError
from pipeline.machine.processes import start_process
from pipeline.private_files import make_private
from pipeline.serving.log_files import LogTail, log_folder, rotate
from pipeline.store import Store
from pipeline.triton.running import SUPERVISED, RunningServer

_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class DetachedSupervisor:
    """A supervisor that was started, with the names of its deployments, their folder of records, and its log."""

    process: subprocess.Popen[bytes]
    running: Path
    names: tuple[str, ...]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> bool:
        """Whether all its deployments are ready."""
        records = (RunningServer.read(self.running, name) for name in self.names)
        return all(
            record is not None and record.pid == self.pid and record.state == "ready" for record in records
        )


class DetachedEnded(ServerError):
    """A supervisor ended before it was ready: the exit code of its process, and the last lines of its output."""

    def __init__(self, code: int, last_lines: Sequence[str], log: Path) -> None:
        self.exit_code = code if code > 0 else 128 - code  # type: ignore[misc]
        self.last_lines = tuple(last_lines)
        super().__init__(f"it ended with exit code {code} before it was ready; its log: {log}")


def start_detached(
    command: Sequence[str], store: Store, names: Sequence[str], *, inherit: Sequence[int] = ()
) -> DetachedSupervisor:
    """Start a supervisor of some deployments in a session of its own, without a terminal.

    Raises:
        UserError: One of them is served already, or the folder of logs cannot be written.
    """
    for name in names:
        record = RunningServer.find(store.running, name, states=SUPERVISED)
        if record is not None:
            raise UserError(
                f"{name} is served already by process {record.pid} at {record.grpc_url}; "
                "stop that first, or name another --store for a second one"
            )
    try:
        log = log_folder(store.logs, names[0]) / "serve.log"
        rotate(log)
        make_private(log, own=True)
        output = log.open("ab")
    except OSError as error:
        raise UserError(
            f"{store.logs} cannot be written ({error.strerror}), and its log goes there"
        ) from error
    with output:
        process = start_process(command, output, {"PYTHONUNBUFFERED": "1"}, inherit=inherit, umask=-1)
    return DetachedSupervisor(process, store.running, tuple(names), log)


def wait_until_ready(started: DetachedSupervisor, say: Callable[[str], None]) -> None:
    """Wait until all deployments of a supervisor are ready, and say each line of its output. Ctrl-C ends it.

    Raises:
        DetachedEnded: It ended before.
    """
    tail, lines = LogTail({"serve": started.log}, _LAST_LINES), list[str]()

    def show() -> None:
        for _, line in tail.read():
            lines.append(line)
            say(line)

    try:
        while not started.ready:
            code = started.process.poll()
            show()
            if code is not None:
                raise DetachedEnded(code or 1, lines[-_LAST_LINES:], started.log)
            tail.wait()
    except KeyboardInterrupt:
        started.process.terminate()
        started.process.wait()
        raise
    finally:
        for _, line in tail.close():
            say(line)
