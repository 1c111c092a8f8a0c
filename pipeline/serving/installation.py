"""The Triton server that the `nvidia-pytriton` wheel carries, and whether it can run here.

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

from pipeline.errors import UserError
from pipeline.extras import install_line
from pipeline.machine.probe import ask

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
        said = ask(["ldd", str(self.stub)], deadline_s, self.environment())
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
