"""The embedded server, on this machine's CPU: the Triton of the `nvidia-pytriton` wheel with our Python models.

The wheel (0.7.0: Triton 2.51, release 24.10) holds a complete server, the Python backend and a stub of it for each
version of Python. What makes the stub hang or crash is looked for before anything is started. The wheel's own Python
package is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipeline.contracts.launching import restricted, tracing
from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.machine.probe import run_command
from pipeline.serving.launch import Start, check_models, mirror


@dataclass(frozen=True, slots=True)
class EmbeddedLauncher:
    """See `pipeline.serving.launch.Launcher`."""

    repository: Path
    models: tuple[str, ...]
    traces: str | None = None  # where an OTLP/HTTP receiver takes spans; None: none are exported

    local = True
    attempts = 2  # one start in about 200 aborts for no reason of ours
    noise = ("Cuda", "CUDA", "libcuda")  # a server with CUDA says that this machine has none

    def check(self) -> None:
        """Raises UserError: Triton cannot run here, or the repository holds other models than it should."""
        check_models(self.repository, self.models)
        Installation.find()

    def launch(self, start: Start) -> EmbeddedLaunch:
        return EmbeddedLaunch(Installation.find(), self.repository, start, self.traces)


@dataclass(frozen=True, slots=True)
class EmbeddedLaunch:
    """See `pipeline.serving.launch.Launch`.

    In the stage the backend and the stub of the running Python lie side by side, as they must and do not in the wheel;
    and it mirrors the repository.
    """

    installation: Installation
    repository: Path
    start: Start
    traces: str | None = None

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
            *start.listeners.options,
            "--metrics-interval-ms=500",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={start.drain_s}",
            *(tracing(self.traces) if self.traces else ()),
        )

    @property
    def environment(self) -> dict[str, str]:
        return self.installation.environment() | {"PIPELINE_TRITON_GRPC": self.start.listeners.grpc_url}

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


WHEEL = "nvidia-pytriton"
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the parts of the server are."""

    root: Path  # …/pytriton/tritonserver
    libraries: Path  # …/nvidia_pytriton.libs
    python: str  # "3.11": version whose stub is used

    @classmethod
    def find(cls, deadline_s: float = _DEADLINE_S) -> Installation:
        """The installation of this Python environment, proven able to run.

        Raises:
            UserError: it is missing or cannot run; the text says what to do.
        """
        spec = importlib.util.find_spec("pytriton")
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"Triton is not installed in {sys.prefix}: install it: {install_line('server')}")
        package = Path(spec.submodule_search_locations[0])
        found = cls(
            root=package / "tritonserver",
            libraries=package.parent / "nvidia_pytriton.libs",
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
        )
        found.check(deadline_s)
        return found

    @property
    def binary(self) -> Path:
        """The server itself."""
        return self.root / "bin" / "tritonserver"

    @property
    def backend(self) -> Path:
        """The Python backend, without its stub."""
        return self.root / "backends" / "python"

    @property
    def stub(self) -> Path:
        """The process that each Python model runs in, for this version of Python."""
        return self.root / "python_backend_stubs" / self.python / "triton_python_backend_stub"

    @property
    def caches(self) -> Path:
        """Triton's response caches."""
        return self.root / "caches"

    def check(self, deadline_s: float = _DEADLINE_S) -> None:
        """Look for what would make the server hang or crash.

        Raises:
            UserError: something would.
        """
        for part in (self.binary, self.backend, self.libraries):
            if not part.exists():
                raise UserError(f"{WHEEL} {_version(WHEEL)} has no {part}: {install_line('server')}")
        if not self.stub.exists():
            have = sorted(folder.name for folder in self.stub.parent.parent.iterdir())
            raise UserError(
                f"{WHEEL} {_version(WHEEL)} has no Python stub for {self.python}; it has {', '.join(have)}"
            )
        numpy = _version("numpy")
        if int(numpy.partition(".")[0]) >= 2:
            raise UserError(f"numpy {numpy} crashes Triton's Python stub: pip install 'numpy<2'")
        missing = self.missing_libraries(deadline_s)
        if missing:
            fix = f"apt-get install libpython{self.python}, or use a Python built with --enable-shared"
            raise UserError(
                f"Triton's Python stub does not find {', '.join(missing)}"
                + (f": {fix}" if _is_python(missing) else "")
            )

    def missing_libraries(self, deadline_s: float = _DEADLINE_S) -> list[str]:
        """Shared libraries that the stub would not find; it would hang for ever instead of saying so.

        Raises:
            UserError: nobody could tell within the deadline.
        """
        if shutil.which("ldd") is None:
            return []
        said = run_command(["ldd", str(self.stub)], deadline_s, self.environment())
        if said.problem:
            raise UserError(f"the libraries of Triton's Python stub cannot be told: {said.problem}")
        return [line.split()[0] for line in said.lines if "not found" in line]

    def environment(self) -> dict[str, str]:
        """What the server's process needs around it: this Python first, and the libraries of both."""
        libraries = [
            str(self.libraries),
            sysconfig.get_config_var("LIBDIR"),
            os.environ.get("LD_LIBRARY_PATH"),
        ]
        return {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join(part for part in libraries if part),
            "PYTHONUNBUFFERED": "1",
        }


def _is_python(libraries: list[str]) -> bool:
    return any(name.startswith("libpython") for name in libraries)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "0"
