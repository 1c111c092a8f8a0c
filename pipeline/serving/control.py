"""Commands from other processes to a supervisor: a unix socket beside its record, one JSON object a line.

    -> {"do": "stop"}
    <- {"progress": "draining the gateway"}        none or more
    <- {"result": {…}}                             or {"error": "…", "exit_code": 2}

Only the user who started the supervisor, and root, are heard: the socket has mode 0600, and the kernel says who
connects. The maker of the `ControlServer` decides which commands there are. A unix socket's address has at most 107
bytes (unix(7)), too few for some stores; both sides therefore go by a descriptor of the folder, /proc/self/fd/N/NAME.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, ServerError, UserError

_MODE = 0o600
# Longest request.
_MOST_BYTES = 64 * 1024
# Time in which a request must have come.
_REQUEST_S = 10.0
_CONNECT_S = 5.0

Say = Callable[[str], None]
# Function that carries out a request. It gets the request and a reporter of progress, and returns the result, or raises
# a PipelineError, whose text and exit code the other side gets.
Handler = Callable[[Mapping[str, Any], Say], Mapping[str, Any]]


class ControlServer:
    """Listens on a socket, and answers each connection in a thread of its own."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        """Prepare a server; entering it as a context makes the socket.

        A socket that is there is replaced: the caller, who holds the lock of the recipe, sees to it that nobody else
        uses it. `handlers` is by command ("do").
        """
        self.path = path
        self._handlers = dict(handlers)
        self._socket: socket.socket | None = None
        self._answering: set[threading.Thread] = set()

    def __enter__(self) -> ControlServer:
        """Raises OSError: the folder's filesystem has no sockets, or cannot be written."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Linux gives the socket's file the mode of its descriptor, so that it is private from its first moment.
            os.fchmod(listening.fileno(), _MODE)
            draft = f".{self.path.name[:40]}.{secrets.token_hex(4)}"
            with _short(self.path.parent) as folder:
                listening.bind(f"{folder}/{draft}")
                listening.listen(16)
                os.replace(f"{folder}/{draft}", f"{folder}/{self.path.name}")
        except OSError:
            listening.close()
            raise
        self._socket = listening
        threading.Thread(target=self._accept, args=(listening,), name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more requests, while the lock is held: the next holder's socket has the same path."""
        listening, self._socket = self._socket, None
        if listening is None:
            return
        self.path.unlink(missing_ok=True)
        # This wakes the thread that accepts; closing alone would not.
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()

    def join(self, timeout_s: float) -> None:
        """Wait until those who asked have their answers."""
        deadline = time.monotonic() + timeout_s
        for thread in tuple(self._answering):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="control", daemon=True)
            self._answering = {answering for answering in self._answering if answering.is_alive()} | {thread}
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        def send(message: Mapping[str, Any]) -> None:
            # Whoever asked may have left; what was asked for is done all the same.
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")

        with connection:
            try:
                _check_user(connection)
                request = _read_request(connection)
                handler = self._handlers.get(str(request.get("do")))
                if handler is None:
                    known = ", ".join(sorted(self._handlers))
                    raise UserError(f"this server cannot {request.get('do')!r}; it can: {known}")
                send({"result": dict(handler(request, lambda text: send({"progress": text})))})
            except PipelineError as error:
                send({"error": str(error), "exit_code": error.exit_code})
            except Exception as error:
                send({"error": f"{type(error).__name__}: {error}", "exit_code": 1})
                raise


def ask(
    path: Path,
    do: str,
    *,
    on_progress: Say = lambda _: None,
    timeout_s: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Ask a supervisor to do something, wait until it is done, and return the result.

    Args:
        path: Path of its socket: `RunningServer.control`.
        do: Name of the command: "status", "stop", …
        timeout_s: Longest time between two lines of the answer; None waits for as long as it lives.

    Raises:
        UserError: It refuses that.
        ServerError: It is gone, does not answer in time, or failed.
    """
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(_CONNECT_S)
            with _short(path.parent) as folder:
                connection.connect(f"{folder}/{path.name}")
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            for line in connection.makefile("r", encoding="utf-8"):
                if not line.endswith("\n"):
                    break
                message = json.loads(line)
                if "progress" in message:
                    on_progress(message["progress"])
                elif "error" in message:
                    kind = UserError if message["exit_code"] == UserError.exit_code else ServerError
                    raise kind(message["error"])
                else:
                    return dict(message["result"])
    except TimeoutError:
        raise ServerError(f"{path}: the supervisor does not answer") from None
    except OSError as error:
        raise ServerError(f"{path}: the supervisor cannot be asked: {error.strerror}") from None
    raise ServerError(f"{path}: the supervisor ended before it was done")


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder, valid while entered."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user not in (0, os.geteuid()):
        raise UserError("this server belongs to another user")


def _read_request(connection: socket.socket) -> dict[str, Any]:
    line, deadline = b"", time.monotonic() + _REQUEST_S
    more = b" "
    try:
        while more and not more.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            more = connection.recv(_MOST_BYTES)
            # What is too long is read to its end, or whoever sends it would not see the answer.
            line = (line + more)[: _MOST_BYTES + 1]
    except TimeoutError:
        raise UserError(f"the request did not come within {_REQUEST_S:g} s") from None
    connection.settimeout(_REQUEST_S)
    try:
        request = json.loads(line if len(line) <= _MOST_BYTES else b"")
    except (ValueError, RecursionError):
        raise UserError(f"a request is a JSON object of at most {_MOST_BYTES} bytes in one line") from None
    if not isinstance(request, dict):
        raise UserError("a request is a JSON object")
    return request
