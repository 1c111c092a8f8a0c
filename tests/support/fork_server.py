"""Programs that one process forks, which has imported their modules: that takes longer than all that they do.

A program hands its arguments, folder, environment and output to the process, and ends as the child that ran them did.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_PROGRAM = """#!{python}
import json, os, socket, sys
umask = os.umask(0o077)
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = [{values!r}, sys.argv[1:], os.getcwd(), dict(os.environ), umask]
    socket.send_fds(server, [json.dumps(asked).encode()], [1, 2])
    server.shutdown(socket.SHUT_WR)
    code = int(server.makefile().read())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def put_program(file: Path, module: str, **values: Any) -> None:
    """Write a program that calls `run(arguments, **values)` of a module, which returns the exit code."""
    address = _server(module)
    file.write_text(_PROGRAM.format(python=sys.executable, address=address, values=values), encoding="utf-8")
    file.chmod(0o755)


@cache
def _server(module: str) -> str:
    """Start the process of a module, which ends with this one; its address."""
    folder = TemporaryDirectory(prefix="fork-")
    address = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, module, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2], start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return address


def serve(module: str, address: str) -> None:
    run = import_module(module).run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("listens", flush=True)
        while True:
            if sys.stdin in select.select([server, sys.stdin], [], [])[0]:
                return
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    _answer(connection, run)


def _answer(connection: socket.socket, run: Any) -> None:
    """Let a child run the program, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    while more := connection.recv(1 << 20):
        data += more
    child = os.fork()
    if child == 0:
        try:
            values, arguments, *place = json.loads(data)
            _become(*place, descriptors)
            code = run(arguments, **values)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


def _become(folder: str, environment: dict[str, str], umask: int, descriptors: list[int]) -> None:
    os.chdir(folder)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    for standard, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, standard)


if __name__ == "__main__":
    serve(*sys.argv[1:])
