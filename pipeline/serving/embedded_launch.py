"""The embedded server, on this machine's CPU: the Triton of the `nvidia-pytriton` wheel with our Python models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.launching import restricted
from pipeline.serving.installation import Installation
from pipeline.serving.launch import Start, check_models
from pipeline.serving.mirror import mirror


@dataclass(frozen=True, slots=True)
class EmbeddedLauncher:
    """See `pipeline.serving.launch.Launcher`."""

    repository: Path
    models: tuple[str, ...]

    attempts = 2  # one start in about 200 aborts for no reason of ours
    noise = ("Cuda", "CUDA", "libcuda")  # a server with CUDA says that this machine has none

    def check(self) -> None:
        """Raises UserError: Triton cannot run here, or the repository holds other models than it should."""
        check_models(self.repository, self.models)
        Installation.find()

    def launch(self, start: Start) -> EmbeddedLaunch:
        return EmbeddedLaunch(Installation.find(), self.repository, start)


@dataclass(frozen=True, slots=True)
class EmbeddedLaunch:
    """See `pipeline.serving.launch.Launch`.

    In the stage the backend and the stub of the running Python lie side by side, as they must and do not in the wheel;
    and it mirrors the repository.
    """

    installation: Installation
    repository: Path
    start: Start

    cleanup = ()
    gave_up = ()

    @property
    def command(self) -> tuple[str, ...]:
        start = self.start
        return (
            str(self.installation.binary),
            f"--model-repository={self.mirror}",
            "--model-control-mode=none",
            *restricted(),
            "--disable-auto-complete-config",
            f"--backend-directory={start.stage / 'backends'}",
            f"--cache-directory={self.installation.caches}",
            f"--backend-config=python,shm-region-prefix-name={start.shared_memory_prefix}",
            f"--backend-config=python,stub-timeout-seconds={round(start.deadline_s)}",
            f"--http-address={start.address}",
            f"--http-port={start.ports.http}",
            f"--grpc-address={start.address}",
            f"--grpc-port={start.ports.grpc}",
            f"--metrics-address={start.address}",
            f"--metrics-port={start.ports.metrics}",
            "--metrics-interval-ms=500",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={start.drain_s}",
        )

    @property
    def environment(self) -> dict[str, str]:
        return self.installation.environment() | {"PIPELINE_TRITON_GRPC": self.start.grpc_url}

    @property
    def mirror(self) -> Path:
        """The repository as the server sees it."""
        return self.start.stage / "repository"

    @property
    def synonyms(self) -> dict[str, str]:
        return {str(self.mirror): str(self.repository)}

    def prepare(self) -> None:
        """Raises UserError: the stage's own path is one that Triton cannot use."""
        mirror(self.repository, self.mirror)
        backend = self.start.stage / "backends" / "python"
        backend.mkdir(parents=True)
        for file in (*self.installation.backend.iterdir(), self.installation.stub):
            (backend / file.name).symlink_to(file.resolve())
