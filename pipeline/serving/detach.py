"""Starts a supervisor as a process of its own, which outlives the terminal and the command that started it.

What it says goes to `<store>/logs/<name>/serve.log`. Whether it is ready, or why it is not, is told by its record, by
that log, and by its exit code.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ServerError, UserError
from pipeline.private_files import make_private
from pipeline.serving.log_files import LogTail, log_folder, rotate
from pipeline.triton.running import SUPERVISED, RunningServer

_SAID_LINES = 20


@dataclass(frozen=True, slots=True)
class DetachedSupervisor:
    """A supervisor that was started.

    Attributes:
        process: It, as long as the one who started it lives.
        running: Folder where its deployments are announced.
        names: Of its deployments.
        log: What it says.
    """

    process: subprocess.Popen[bytes]
    running: Path
    names: tuple[str, ...]
    log: Path

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    @property
    def ready(self) -> bool:
        """Whether all its deployments are."""
        records = (RunningServer.read(self.running, name) for name in self.names)
        return all(one is not None and one.pid == self.pid and one.state == "ready" for one in records)


class DetachedEnded(ServerError):
    """A supervisor ended before it was ready.

    Attributes:
        exit_code: That of its process.
        said: What it said last.
    """

    def __init__(self, code: int, said: Sequence[str], log: Path) -> None:
        self.exit_code = code if code > 0 else 128 - code  # type: ignore[misc]
        self.said = tuple(said)
        super().__init__(f"it ended with exit code {code} before it was ready; its log: {log}")


def start_detached(
    command: Sequence[str], running: Path, logs: Path, names: Sequence[str]
) -> DetachedSupervisor:
    """Start a supervisor in a session of its own, without a terminal.

    Args:
        command: Its command line.
        running: The store's folder of records.
        logs: The store's folder of logs.
        names: Of the deployments that it will serve.

    Raises:
        UserError: One of them is served already, or the folder of logs cannot be written.
    """
    for name in names:
        record = RunningServer.find(running, name, states=SUPERVISED)
        if record is not None:
            raise UserError(
                f"{name} is served already by process {record.pid} at {record.grpc_url}; "
                "stop that first, or name another --store for a second one"
            )
    try:
        log = log_folder(logs, names[0]) / "serve.log"
        rotate(log)
        make_private(log, own=True)
        output = log.open("ab")
    except OSError as error:
        raise UserError(f"{logs} cannot be written ({error.strerror}), and its log goes there") from error
    with output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    return DetachedSupervisor(process, running, tuple(names), log)


def wait_until_ready(started: DetachedSupervisor, say: Callable[[str], None]) -> None:
    """Wait until all deployments of a supervisor are ready. Ctrl-C ends it.

    Args:
        started: The supervisor.
        say: Gets each line that it says meanwhile.

    Raises:
        DetachedEnded: It ended before; with what it said last, and its exit code.
    """
    tail, said = LogTail({"serve": started.log}, _SAID_LINES), list[str]()

    def hear() -> None:
        for _, line in tail.read():
            said.append(line)
            say(line)

    try:
        while not started.ready:
            code = started.process.poll()
            hear()
            if code is not None:
                raise DetachedEnded(code or 1, said[-_SAID_LINES:], started.log)
            tail.wait()
    except KeyboardInterrupt:
        started.process.terminate()
        started.process.wait()
        raise
    finally:
        for _, line in tail.close():
            say(line)
