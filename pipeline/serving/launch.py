"""What every start of a Triton server has in common, whoever runs it: where it listens, what it is given, what it is.

A `Launcher` knows a package and a way to serve it; for each attempt it makes a `Launch`, a value that can be looked
at and compared before anything runs. `server.TritonServer` does the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import Fault, InvalidInput, ServerError

LOOPBACK = "127.0.0.1"
ANYWHERE = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the server listens."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nobody listens on now; another process may still take one before Triton does."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(3)]
            return cls(*(sock.getsockname()[1] for sock in sockets))

    @classmethod
    def choose(
        cls,
        address: str = LOOPBACK,
        *,
        http: int | None = None,
        grpc: int | None = None,
        metrics: int | None = None,
    ) -> Ports:
        """The ports that are given; for the others Triton's usual ones, or free ones where those are taken."""
        free = cls.free()
        return cls(
            http=http or (8000 if _is_free(address, 8000) else free.http),
            grpc=grpc or (8001 if _is_free(address, 8001) else free.grpc),
            metrics=metrics or (8002 if _is_free(address, 8002) else free.metrics),
        )

    def check(self, address: str = LOOPBACK) -> None:
        """Raises ServerError if a port is taken, or two are the same."""
        faults = self.faults(address)
        if faults:
            raise ServerError("; ".join(faults))

    def faults(self, address: str = LOOPBACK) -> list[str]:
        """What keeps a server from listening here."""
        if len({self.http, self.grpc, self.metrics}) < 3:
            return [f"HTTP {self.http}, gRPC {self.grpc} and metrics {self.metrics} must be three ports"]
        found = []
        for kind, port in (("HTTP", self.http), ("gRPC", self.grpc), ("metrics", self.metrics)):
            try:
                socket.create_server((address, port)).close()
            except OSError as error:
                found.append(f"{kind} port {address}:{port} cannot be used: {error.strerror}")
        return found


@dataclass(frozen=True, slots=True)
class Start:
    """What one attempt to start a server is given."""

    stage: Path  # a folder of its own, removed at the end
    ports: Ports
    shared_memory_prefix: str  # of the regions in /dev/shm, and unique to this start
    address: str = LOOPBACK
    deadline_s: float = 120.0
    drain_s: int = 5  # requests in flight have this long to finish when the server is told to stop

    @property
    def reachable(self) -> str:
        """The address to connect to from this machine."""
        return LOOPBACK if self.address == ANYWHERE else self.address

    @property
    def grpc_url(self) -> str:
        """Where gRPC clients connect; no scheme, as tritonclient wants it."""
        return f"{self.reachable}:{self.ports.grpc}"


class Launch(Protocol):
    """One start of a server."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments."""

    @property
    def environment(self) -> dict[str, str]:
        """All that its process has around it."""

    @property
    def cleanup(self) -> tuple[str, ...]:
        """A command to run when it has ended, whichever way; none if empty."""

    @property
    def gave_up(self) -> tuple[str, ...]:
        """Phrases of its log after which it will not become ready, though it may still be there."""

    @property
    def synonyms(self) -> dict[str, str]:
        """Paths that its log speaks of -> what the user knows them as."""

    def prepare(self) -> None:
        """Make on disk what the command needs."""


class Launcher(Protocol):
    """A way to serve one package."""

    @property
    def attempts(self) -> int:
        """How often a start that a signal ended is made."""

    @property
    def noise(self) -> tuple[str, ...]:
        """Words of lines that its log calls errors though nothing is wrong."""

    def check(self) -> None:
        """Look for what would keep it from starting. Raises UserError."""

    def launch(self, start: Start) -> Launch:
        """What is run for one attempt."""


def check_models(repository: Path, models: Sequence[str]) -> None:
    """See that a model repository holds these models, and no other folder: Triton loads whatever lies there.

    Raises:
        InvalidInput: some are missing, or there are more; all of them.
    """
    found = {path.name for path in repository.iterdir() if path.is_dir()} if repository.is_dir() else set()
    missing = [
        Fault("is missing", where=str(repository), key=name, fix="build the package again")
        for name in models
        if name not in found
    ]
    stray = [
        Fault("is none of the deployment's models, and Triton would load it", where=str(repository), key=name,
              fix="move it away")
        for name in sorted(found - set(models))
    ]  # fmt: skip
    if missing or stray:
        raise InvalidInput("the model repository is not the one that was packaged", [*missing, *stray])


def _is_free(address: str, port: int) -> bool:
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True
