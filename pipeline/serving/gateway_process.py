"""The gateway as a child of the supervisor: a message that somebody above gives, and sockets that outlive it.

The supervisor holds the listening sockets and hands them down, so that connections wait, and are not refused, while a
gateway is started again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import MappingProxyType

from pipeline.errors import ServerError
from pipeline.keeper import HealthIssue, StartCancelled
from pipeline.machine.processes import start_process
from pipeline.process_state import SUPERVISOR, ProcessPulse, exit_reason, own_mark
from pipeline.serving import triton_log
from pipeline.serving.log_files import LogLimit, open_log, rotate
from pipeline.settings import Settings

_BACKLOG = 2048
_POLL_S = 0.05
_PROBE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayLaunch:
    """How a gateway is started.

    Attributes:
        command: Command line of a gateway; the descriptor that it reads `message` from follows.
        message: Settings of the gateway: it takes `sockets` by their descriptors, and ends when its parent does.
        sockets: Bound, and not listening yet.
        url: For clients, as http://host:port.
        start_deadline_s: Time in which it must answer.
        drain_s: Time that requests may still take after a stop.
    """

    command: tuple[str, ...]
    message: Settings
    sockets: Sequence[socket.socket]
    url: str
    needs_key: bool = False
    start_deadline_s: float = 120.0
    drain_s: float = 30.0


class GatewayProcess:
    """A gateway that can be started again and again on the same sockets; see `pipeline.keeper.Component`."""

    kind, title = "gateway", "the gateway"
    # It listens from the beginning, and goes on when its process is started again.
    addresses: Mapping[str, str] = MappingProxyType({})

    def __init__(self, launch: GatewayLaunch, log_file: Path) -> None:
        """Listen, so that clients can connect from now on; `start` starts the process that answers."""
        self.launch, self.log_file = launch, log_file
        self._log_limit = LogLimit(log_file)
        self._process: subprocess.Popen[bytes] | None = None
        self._check: _GatewayCheck | None = None
        for listening in launch.sockets:
            listening.listen(_BACKLOG)

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._process is None else (self._process.pid,)

    def start(self, stop: Event) -> None:
        rotate(self.log_file)
        message = self.launch.message.to_descriptor()
        with open_log(self.log_file) as output, os.fdopen(message):
            inherit = [message, *(listening.fileno() for listening in self.launch.sockets)]
            command = (*self.launch.command, str(message))
            self._process = start_process(command, output, {SUPERVISOR: own_mark()}, inherit=inherit)
        self._check = _GatewayCheck(self._process.pid, self.launch.sockets[0])
        deadline = time.monotonic() + self.launch.start_deadline_s
        while not self._check.answered:
            if (why := self._ended()) is not None:
                raise ServerError(why)
            if stop.is_set():
                raise StartCancelled("the gateway was told to stop before it was ready")
            if time.monotonic() > deadline:
                raise self._failure(f"the gateway was not ready within {self.launch.start_deadline_s:g} s")
            self._check.fault()
            time.sleep(_POLL_S)

    def check(self) -> HealthIssue | None:
        assert self._check is not None, "start made it"
        self._log_limit.check()
        why = self._ended() or self._check.fault()
        return None if why is None else HealthIssue("fault", why)

    def stop(self, *, at_once: bool) -> None:
        if self._process is None:
            return
        if not at_once:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.launch.drain_s + 5)
        self._process.kill()
        self._process.wait()
        assert self._check is not None, "start made it"
        self._check.close()
        self._process = self._check = None

    def close(self) -> None:
        """Refuse connections from now on; those that the process has are its own."""
        for listening in self.launch.sockets:
            listening.close()

    def _ended(self) -> str | None:
        assert self._process is not None, "start made it"
        code = self._process.poll()
        if code is None:
            return None
        return str(self._failure(f"the gateway {exit_reason(code)}"))

    def _failure(self, problem: str) -> ServerError:
        lines = [f"  | {line[:200]}" for line in triton_log.tail(self.log_file, 10)]
        return ServerError("\n".join([problem, *lines, f"its log: {self.log_file}"]))


class _GatewayCheck:
    """Asks a gateway for /healthz about once a second, without ever waiting for the answer."""

    def __init__(self, pid: int, listening: socket.socket) -> None:
        self.answered = False  # whether it ever was
        self._pid, self._listening, self._pulse = pid, listening, ProcessPulse(pid)
        self._connection: socket.socket | None = None
        self._next = time.monotonic()  # when to ask again

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def fault(self) -> str | None:
        """Go on asking. Returns what is wrong."""
        now = time.monotonic()
        if not self._pulse.awaited and now >= self._next:
            self._pulse.ask()
            self._next = now + _PROBE_INTERVAL_S
        if not self._pulse.awaited:
            pass
        elif self._connection is None:
            self._connection = self._ask()
        elif select.select([self._connection], [], [], 0)[0]:
            self.answered = True
            self._pulse.hear()
            self.close()
        why = self._pulse.fault()
        # Until it has answered for the first time, it starts.
        if why is None or not (self.answered or why == "is stopped"):
            return None
        return f"process {self._pid} of the gateway {why}"

    def _ask(self) -> socket.socket | None:
        """A connection with a request under way. None where its backlog is full."""
        host, port = self._listening.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        named = f"[{host}]" if ":" in host else host
        try:
            connection = socket.create_connection((host, port), timeout=0.5)
        except OSError:
            return None
        connection.sendall(
            f"GET /healthz HTTP/1.1\r\nHost: {named}:{port}\r\nConnection: close\r\n\r\n".encode()
        )
        return connection
