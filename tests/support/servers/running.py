"""A server process that is started and stopped, several times if need be, on the same port with the same data."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

_READY_S = 30.0
# Where util-linux is there: a server ends with the tests, even when those are killed.
_UNTIL_WE_END = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


class Server:
    """Base of the servers; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pipeline-server-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """The command line that runs it in the foreground."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Its environment."""
        return {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}

    def user(self) -> str | None:
        """Whom it runs as, if not as the tests do."""
        return None

    def start(self) -> None:
        """Return as soon as it listens."""
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                (*self._as_user(), *_UNTIL_WE_END, *self.command()),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + _READY_S
        while not self.is_ready():
            late = time.monotonic() > deadline or self._process.poll() is not None
            assert not late, log.read_text(errors="replace")[-2000:]
            time.sleep(0.02)

    def _as_user(self) -> Sequence[str]:
        """Not by Popen, which would fork: in a process that has used gRPC, the copy may not live to run anything."""
        if (user := self.user()) is None:
            return ()
        return ("setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups")

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it, by default as a crash would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def pause(self) -> None:
        """It stays connected and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again."""
        self._signal(signal.SIGCONT)

    def _signal(self, which: signal.Signals) -> None:
        """To the process and its children, each of which may be in a group of its own."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(each, which)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
