"""The command that starts Triton, as a value: it can be looked at, compared and printed before anything runs."""

from __future__ import annotations

import os
import shlex
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ServerError, UserError
from pipeline.triton.installation import Installation

LOOPBACK = "127.0.0.1"


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
        if len({self.http, self.grpc, self.metrics}) < 3:
            raise ServerError(
                f"HTTP {self.http}, gRPC {self.grpc} and metrics {self.metrics} must be three ports"
            )
        for kind, port in (("HTTP", self.http), ("gRPC", self.grpc), ("metrics", self.metrics)):
            try:
                socket.create_server((address, port)).close()
            except OSError as error:
                raise ServerError(f"{kind} port {address}:{port} cannot be used: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of the server.

    `stage` is a folder of our own. The backend and the stub of the running Python lie side by side in it, as they must
    and do not in the wheel. And it mirrors the repository, file by file: Python writes byte-code beside its sources
    (the stub heeds no setting against that), which must not end up in the store, and Triton hands paths to a shell
    unquoted, so that the name of the repository's own folder may not matter.
    """

    installation: Installation
    stage: Path
    repository: Path
    models: tuple[str, ...]
    ports: Ports
    shared_memory_prefix: str  # of the regions in /dev/shm, one or more for each model
    address: str = LOOPBACK
    start_deadline_s: float = 120.0
    drain_s: int = 5  # requests in flight have this long to finish when the server is told to stop

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return (
            str(self.installation.binary),
            f"--model-repository={self.mirror}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in self.models),
            "--disable-auto-complete-config",
            f"--backend-directory={self.stage / 'backends'}",
            f"--cache-directory={self.installation.caches}",
            f"--backend-config=python,shm-region-prefix-name={self.shared_memory_prefix}",
            f"--backend-config=python,stub-timeout-seconds={round(self.start_deadline_s)}",
            f"--http-address={self.address}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.address}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.address}",
            f"--metrics-port={self.ports.metrics}",
            "--metrics-interval-ms=500",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={self.drain_s}",
        )

    @property
    def mirror(self) -> Path:
        """The repository as the server sees it."""
        return self.stage / "repository"

    def prepare(self) -> None:
        """Fill the stage.

        Raises:
            UserError: the stage's own path is one that Triton cannot use.
        """
        if shlex.quote(str(self.stage)) != str(self.stage):
            raise UserError(
                f"{self.stage}: Triton needs a temporary folder without spaces in its name: set TMPDIR"
            )
        backend = self.stage / "backends" / "python"
        backend.mkdir(parents=True)
        for file in (*self.installation.backend.iterdir(), self.installation.stub):
            (backend / file.name).symlink_to(file.resolve())
        for folder, _, files in os.walk(self.repository):
            if "__pycache__" not in folder:
                mirrored = self.mirror / Path(folder).relative_to(self.repository)
                mirrored.mkdir()
                for name in files:
                    (mirrored / name).symlink_to(Path(folder, name).resolve())


def _is_free(address: str, port: int) -> bool:
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True
