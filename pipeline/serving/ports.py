"""Addresses on which Triton listens, and ports at which others reach it.

Triton can listen on one gRPC address only, and one request can end it. So it listens on a socket in a folder that no
other user can enter: our own processes reach it there, and no other process can take its place while it is started
again. The ports at which others reach it are served by `pipeline.gateway.front`. In NVIDIA's own containers, where
nothing of ours runs, Triton listens on ports, and HTTP is off.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.launching import listening
from pipeline.errors import ServerError, UserError
from pipeline.extras import install_line
from pipeline.machine.processes import start_process
from pipeline.recipe import Recipe
from pipeline.serving.log_files import open_log

LOOPBACK = "127.0.0.1"
ANYWHERE = "0.0.0.0"
# Triton's usual ports, and those of containers.
HTTP, GRPC, METRICS = 8000, 8001, 8002
# `sun_path` of unix(7), without its last zero.
_LONGEST_SOCKET_PATH = 107
_BACKLOG = 512
# Pause between two starts of a process that dies at once.
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports at which others reach a deployment's Triton.

    Attributes:
        http: HTTP, behind the guard of `pipeline.gateway.front`; None for none.
        grpc: gRPC; None for none.
        metrics: Page of metrics.
        movable: Whether others may be taken where one of these is in use, because none was asked for.
    """

    http: int | None
    grpc: int | None
    metrics: int
    movable: bool = False

    @classmethod
    def free(cls, *, http: bool = False, grpc: bool = True) -> Ports:
        """Choose ports, of the protocols that are open, on which no process listens now; they may still be taken."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(3)]
            numbers = [sock.getsockname()[1] for sock in sockets]
        return cls(numbers[0] if http else None, numbers[1] if grpc else None, numbers[2], movable=True)

    @classmethod
    def choose(cls, recipe: Recipe, *, usual: bool = True) -> Ports:
        """Choose the ports of a deployment: those that its recipe names, else Triton's usual ones, else free ones.

        Args:
            usual: Whether the usual ones may be taken; not for a second deployment.
        """
        wanted = recipe.triton
        free = cls.free(http=recipe.serving.http, grpc=recipe.serving.grpc)

        def choose(wanted_port: int | None, port: int, other: int) -> int:
            return wanted_port or (_usual(wanted.address, port, other) if usual else other)

        return cls(
            http=free.http and choose(wanted.http_port, HTTP, free.http),
            grpc=free.grpc and choose(wanted.grpc_port, GRPC, free.grpc),
            metrics=choose(wanted.metrics_port, METRICS, free.metrics),
            movable=not (wanted.http_port or wanted.grpc_port or wanted.metrics_port),
        )

    def moved(self) -> Ports:
        """Choose other free ports for the same protocols."""
        return Ports.free(http=self.http is not None, grpc=self.grpc is not None)

    @property
    def open(self) -> dict[str, int]:
        """Protocol -> port, of the protocols that are open."""
        ports = {"HTTP": self.http, "gRPC": self.grpc, "metrics": self.metrics}
        return {kind: port for kind, port in ports.items() if port is not None}

    def check(self, address: str = LOOPBACK) -> None:
        """Raises ServerError if a port is taken, or two are the same."""
        if faults := self.faults(address):
            raise ServerError("; ".join(faults))

    def faults(self, address: str = LOOPBACK) -> list[str]:
        """List what keeps a server from listening here."""
        if len(set(self.open.values())) < len(self.open):
            named = [f"{kind} {port}" for kind, port in self.open.items()]
            return [f"{', '.join(named[:-1])} and {named[-1]} must be different ports"]
        unusable = []
        for kind, port in self.open.items():
            try:
                socket.create_server((address, port)).close()
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else error
                unusable.append(f"{kind} port {address}:{port} cannot be used: {why}")
        return unusable


@dataclass(frozen=True, slots=True)
class Listeners:
    """Addresses on which Triton itself listens, with ports, as its options take them.

    An address may be `unix:` and a path. HTTP then listens on a socket of that path (evhtp's `evhtp_bind_socket`), and
    gRPC on a socket that is called path:port (`server_addr_` in Triton's src/grpc/grpc_server.cc).

    Attributes:
        http: None where it is off.
    """

    grpc: tuple[str, int]
    http: tuple[str, int] | None
    metrics: tuple[str, int]

    @classmethod
    def at(cls, ports: Ports, address: str = LOOPBACK) -> Listeners:
        """Return the addresses of a Triton that listens on ports: in a container of NVIDIA's image."""
        assert ports.grpc is not None, "there is no other way to it"
        return cls((address, ports.grpc), None, (address, ports.metrics))

    @classmethod
    def within(cls, folder: Path, ports: Ports, address: str = LOOPBACK) -> Listeners:
        """Return the addresses of a Triton that listens on sockets in a folder, but for the page of metrics.

        Only the user of the server can enter the folder.
        """
        http = None if ports.http is None else (f"unix:{folder}/http", 1)
        return cls((f"unix:{folder}/grpc", 1), http, (address, ports.metrics))

    @property
    def grpc_url(self) -> str:
        """gRPC target by which processes of the same machine, and the same user, reach it."""
        address, port = self.grpc
        return f"{LOOPBACK if address == ANYWHERE else address}:{port}"

    @property
    def options(self) -> tuple[str, ...]:
        """Options of Triton; see `arguments` in contracts/data/launching.yaml."""
        return listening(grpc=self.grpc, http=self.http, metrics=self.metrics)


class ServerAddresses:
    """Addresses by which clients find a server."""

    def __init__(self, ports: Ports | None, address: str, *, local: bool) -> None:
        """Choose free ports if none are given; see `TritonServer`. Raises UserError if TMPDIR is too long a path."""
        self.address = address
        self._local = local
        self.ports = ports or Ports.free(grpc=not local)
        # The same for all starts, so that clients find the next start where the last was.
        self._folder = Path(tempfile.mkdtemp(prefix="pipeline-"))
        if len(os.fsencode(self._folder / "grpc:1")) > _LONGEST_SOCKET_PATH:
            self._folder.rmdir()
            raise UserError(
                f"{self._folder.parent}: is too long for the path of a socket: set TMPDIR to a shorter folder"
            )
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def make_folder(self) -> None:
        """Make the folder of the sockets if it has gone. Raises ServerError if another user made it meanwhile."""
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        status = self._folder.lstat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise ServerError(f"{self._folder}: is not this user's alone")

    @property
    def listeners(self) -> Listeners:
        """Addresses on which Triton itself listens, as processes of this machine see them."""
        if self._local:
            return Listeners.within(self._folder, self.ports, self.address)
        return Listeners.at(self.ports, self.address)

    @property
    def target(self) -> str:
        """gRPC target for processes of the same user on this machine."""
        return self.listeners.grpc_url

    @property
    def grpc_socket(self) -> str:
        """`target`, where it is a socket; else empty."""
        return self.target if self._local else ""

    @property
    def grpc_url(self) -> str:
        """gRPC target for others, host:port; where no port is open, the one for processes of the same user."""
        return self.target if self.ports.grpc is None else f"{self._reachable}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """URL for HTTP clients; empty where HTTP is off."""
        return "" if self.ports.http is None else f"http://{self._reachable}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        """URL of the page that Prometheus reads."""
        return f"http://{self._reachable}:{self.ports.metrics}/metrics"

    @property
    def record_fields(self) -> dict[str, str]:
        """Fields of the deployment's record."""
        return {
            "grpc_url": self.grpc_url,
            "grpc_socket": self.grpc_socket,
            "http_url": self.http_url,
            "metrics_url": self.metrics_url,
        }

    @property
    def _reachable(self) -> str:
        """The address to connect to from this machine."""
        return LOOPBACK if self.address == ANYWHERE else self.address


class PublishedPorts:
    """TCP ports of one start of a server. Not for use from several threads."""

    def __init__(self, address: str, ports: Ports, listeners: Listeners, hosts: Sequence[str]) -> None:
        """Bind the ports that are open.

        Args:
            listeners: Addresses on which Triton listens.
            hosts: Names by which requests over HTTP may call this machine, besides those of loopback.

        Raises:
            ServerError: A port is taken.
            UserError: HTTP needs packages that are not installed.
        """
        if listeners.http is not None and importlib.util.find_spec("uvicorn") is None:
            raise UserError(f"serving.http: true: the guard is not installed: {install_line('gateway')}")
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._sockets: dict[str, socket.socket] = {}
        self._stack = ExitStack()
        for name, kind, port in (("grpc", "gRPC", ports.grpc), ("http", "HTTP", ports.http)):
            if port is None:
                continue
            try:
                bound = socket.create_server((address, port), backlog=_BACKLOG)
            except OSError as error:
                self.close()
                raise ServerError(f"{kind} port {address}:{port} cannot be used: {error.strerror}") from error
            self._sockets[name] = self._stack.enter_context(bound)
        self._settings = {
            "grpc_socket": listeners.grpc_url.removeprefix("unix:"),
            "http_socket": None if listeners.http is None else listeners.http[0].removeprefix("unix:"),
            "address": address,
            "hosts": list(hosts),
        }

    def serve(self, environment: Mapping[str, str], log_file: Path) -> bool:
        """Start the process that serves them, if there are any, unless it runs; its output is appended to a file.

        Returns:
            Whether it runs, or is not needed.
        """
        if not self._sockets or (self._process is not None and self._process.poll() is None):
            return True
        if time.monotonic() - self._began < _PAUSE_S:
            return False
        self._began = time.monotonic()
        settings = {name: bound.fileno() for name, bound in self._sockets.items()} | self._settings
        with open_log(log_file, own=False) as output:
            inherit = [bound.fileno() for bound in self._sockets.values()]
            command = [sys.executable, "-m", "pipeline.gateway.front", json.dumps(settings)]
            self._process = start_process(command, output, environment, inherit=inherit)
        return True

    def close(self) -> None:
        """End the process, and give the ports back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._stack.close()


def check_container_ports(ports: Ports) -> None:
    """Raises UserError if a container of NVIDIA's image, in which nothing of ours runs, cannot have such ports."""
    if ports.http is not None:
        raise UserError(
            "serving.http: true: NVIDIA's container has no guard in front of Triton's HTTP; "
            "`triton.container: false` and `pipeline deploy --target compose` have one"
        )
    if ports.grpc is None:
        raise UserError(
            "serving.grpc: false: a container is reached by its gRPC port alone; use `triton.container: false` "
            "or `pipeline deploy --target compose`"
        )


def _usual(address: str, port: int, otherwise: int) -> int:
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return otherwise
    return port
