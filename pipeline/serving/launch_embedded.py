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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipeline.contracts.launching import restricted, tracing
from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.machine.probe import run_command
from pipeline.serving.launch import Launch, Start, check_models, mirror


def embedded_launch(
    repository: Path,
    models: Sequence[str],
    start: Start,
    *,
    traces: str | None = None,
    installation: Installation | None = None,
) -> Launch:
    """Make the command of a server on this machine's CPU.

    In the stage the backend and the stub of the running Python lie side by side, as they must and do not in the wheel;
    and it mirrors the repository.

    Args:
        repository: Model repository, an absolute path, which must hold exactly the `models`.
        traces: URL of an OTLP/HTTP receiver of spans; None for no spans.
        installation: Server to start; None for the one of this Python environment.

    Raises:
        UserError: Triton cannot run here.
    """
    installation = installation or Installation.find()
    mirrored, backends = start.stage / "repository", start.stage / "backends"

    def prepare() -> None:
        check_models(repository, models)
        mirror(repository, mirrored)
        backend = backends / "python"
        backend.mkdir(parents=True)
        for file in (*installation.backend.iterdir(), installation.stub):
            (backend / file.name).symlink_to(file.resolve())

    return Launch(
        command=(
            str(installation.binary),
            f"--model-repository={mirrored}",
            "--model-control-mode=none",
            *restricted(),
            "--disable-auto-complete-config",
            f"--backend-directory={backends}",
            f"--cache-directory={installation.caches}",
            f"--backend-config=python,shm-region-prefix-name={start.shared_memory_prefix}",
            f"--backend-config=python,stub-timeout-seconds={round(start.deadline_s)}",
            *start.listeners.options,
            "--metrics-interval-ms=500",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={start.drain_s}",
            *(tracing(traces) if traces else ()),
        ),
        environment=installation.environment() | {"PIPELINE_TRITON_GRPC": start.listeners.grpc_url},
        prepare=prepare,
        # One start in about 200 aborts for no reason of ours.
        attempts=2,
        # A server with CUDA says that this machine has none.
        noise=("Cuda", "CUDA", "libcuda"),
        synonyms={str(mirrored): str(repository)},
    )


WHEEL = "nvidia-pytriton"
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Installation:
    """Paths of the server's parts.

    Attributes:
        root: …/pytriton/tritonserver
        libraries: …/nvidia_pytriton.libs
        python: Version of Python whose stub is used, such as "3.11".
    """

    root: Path
    libraries: Path
    python: str

    @classmethod
    def find(cls, deadline_s: float = _DEADLINE_S) -> Installation:
        """Find the installation of this Python environment, and prove that it can run.

        Raises:
            UserError: It is missing or cannot run; the text says what to do.
        """
        spec = importlib.util.find_spec("pytriton")
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"Triton is not installed in {sys.prefix}: install it: {install_line('server')}")
        package = Path(spec.submodule_search_locations[0])
        installation = cls(
            root=package / "tritonserver",
            libraries=package.parent / "nvidia_pytriton.libs",
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
        )
        installation.check(deadline_s)
        return installation

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
            UserError: Something would.
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
                + (f": {fix}" if any(name.startswith("libpython") for name in missing) else "")
            )

    def missing_libraries(self, deadline_s: float = _DEADLINE_S) -> list[str]:
        """List shared libraries that the stub would not find; it would hang for ever instead of saying so.

        Raises:
            UserError: ldd failed, or did not answer within the deadline.
        """
        if shutil.which("ldd") is None:
            return []
        output = run_command(["ldd", str(self.stub)], deadline_s, {**os.environ, **self.environment()})
        if output.problem:
            raise UserError(f"the libraries of Triton's Python stub cannot be told: {output.problem}")
        return [line.split()[0] for line in output.lines if "not found" in line]

    def environment(self) -> dict[str, str]:
        """Variables that the server's process needs: this Python first, and the libraries of both."""
        libraries = [
            str(self.libraries),
            sysconfig.get_config_var("LIBDIR"),
            os.environ.get("LD_LIBRARY_PATH"),
        ]
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join(part for part in libraries if part),
            "PYTHONUNBUFFERED": "1",
        }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "0"
