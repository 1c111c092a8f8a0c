"""Programs that deployments need: mpirun, Triton, TensorRT-LLM, and the Python that Triton's models run in.

That Python, of this machine or of an image, is asked by a process of its own, because it need not be the one that runs
this. Nothing heavy is imported in it: versions come from the metadata of distributions, modules are only looked for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.machine.probe import run_command
from pipeline.plan.machine_facts import SoftwareFacts

_DEADLINE_S = 60.0
_BUILDER = "trtllm-build"
_TENSORRT_LLM = "import importlib.metadata; print(importlib.metadata.version('tensorrt_llm'))"
_SERVER = "opt/tritonserver/bin/tritonserver"  # where the containers have it
_FAMILIES = (  # what --version begins with, as printed by Open MPI 4.1 and 5.0, Intel MPI 2021 and MPICH 4
    ("Open MPI", re.compile(r"\(Open MPI\) (\S+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI .*Version (\S+)")),
    ("MPICH", re.compile(r"HYDRA.*?Version:\s+(\S+)", re.DOTALL)),
)


@dataclass(frozen=True, slots=True)
class Mpi:
    """The mpirun that is on PATH."""

    family: str | None  # "Open MPI"; None: there is no mpirun, or it does not say
    version: str | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TritonProgram:
    """A tritonserver outside the Python environment, as NVIDIA's containers have it."""

    path: str | None
    release: str | None  # of the container: "26.07"
    version: str | None  # of the server: "2.60.0"


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """The trtllm-build that is on PATH."""

    path: str | None
    version: str | None  # of its TensorRT-LLM; None: there is none, or its Python does not tell


def read_mpi(deadline_s: float = _DEADLINE_S) -> Mpi:
    """Read the family and version of the mpirun on PATH."""
    output = run_command(["mpirun", "--version"], deadline_s)
    if output.problem:
        return Mpi(None, None, output.problem)
    for family, pattern in _FAMILIES:
        match = pattern.search(output.text)
        if match is not None:
            return Mpi(family, match[1])
    return Mpi(None, None, f"mpirun does not say whose it is: {output.text.strip()[:80]!r}")


def read_triton(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> TritonProgram:
    """The server on PATH, or where the containers have it; versions as the containers declare them."""
    path = shutil.which("tritonserver", path=environment.get("PATH"))
    if path is None and (root / _SERVER).is_file():
        path = str(root / _SERVER)
    if path is None:
        return TritonProgram(None, None, None)
    return TritonProgram(
        path, environment.get("NVIDIA_TRITON_SERVER_VERSION"), environment.get("TRITON_SERVER_VERSION")
    )


def read_builder(deadline_s: float = _DEADLINE_S) -> EngineBuilder:
    """The trtllm-build that a native build would run."""
    path = shutil.which(_BUILDER)
    return EngineBuilder(path, tensorrt_llm_of(Path(path), deadline_s) if path else None)


def tensorrt_llm_of(program: Path, deadline_s: float = _DEADLINE_S) -> str | None:
    """Version of the TensorRT-LLM that a console script belongs to; None where the script's Python does not tell.

    The metadata of the distribution is read by that Python; importing TensorRT-LLM itself would take half a minute and
    a GPU.
    """
    python = _interpreter(program)
    if python is None:
        return None
    output = run_command([*python, "-c", _TENSORRT_LLM], deadline_s)
    return output.text.strip() or None


def _interpreter(script: Path) -> list[str] | None:
    """The Python of a script's first line; pip writes `#!/bin/sh` and `exec` where its path is too long for that."""
    with script.open("rb") as file:
        first, second = (file.readline().decode(errors="replace").strip() for _ in range(2))
    if not first.startswith("#!"):
        return None
    argv = shlex.split(first[2:])
    if argv and Path(argv[0]).name == "sh" and second.startswith("'''exec' "):
        argv = shlex.split(second.removeprefix("'''exec' "))[:1]
    return argv if any("python" in Path(word).name for word in argv) else None


_SOFTWARE_DEADLINE_S = 120.0
_QUESTION = """
import importlib.metadata as metadata, importlib.util, json, os, sys
def version(*names):
    for name in names:
        try: return metadata.version(name)
        except metadata.PackageNotFoundError: pass
def there(name):
    try: return importlib.util.find_spec(name) is not None
    except ImportError: return False
print(json.dumps({
    "tensorrt_llm": version("tensorrt-llm", "tensorrt_llm"),
    "tensorrt": version("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "release": os.environ.get("NVIDIA_TRITON_SERVER_VERSION"),
    "missing": [name for name in sys.argv[1:] if not there(name)],
}))
"""


@dataclass(frozen=True, slots=True)
class Software:
    """Software of a Python environment that serves."""

    tensorrt_llm: str | None
    tensorrt: str | None
    release: str | None  # of the Triton container, by its NVIDIA_TRITON_SERVER_VERSION: "26.07"
    missing: tuple[str, ...] = ()  # modules that the models import and that are not there
    programs: frozenset[str] | None = None  # programs that were asked for and are there; None: unknown
    own: bool = False  # whether it is this machine's own, whose limits then count, too

    def facts(self) -> SoftwareFacts:
        """Facts that rules judge."""
        return SoftwareFacts(self.tensorrt_llm, self.tensorrt, self.release, self.missing, self.programs)


def software_here(
    programs: Sequence[str] = (), modules: Sequence[str] = (), deadline_s: float = _SOFTWARE_DEADLINE_S
) -> Software:
    """Read the software of this machine, or of the container that this runs in.

    Raises:
        ServerError: Its Python does not answer.
    """
    python = shutil.which("python3") or sys.executable
    present = frozenset(name for name in programs if shutil.which(name) is not None)
    return replace(_answer([python], modules, deadline_s), programs=present, own=True)


def software_of_image(reference: str, modules: Sequence[str]) -> Software:
    """Read the software of a local image: a container of it runs for some seconds, without a GPU or a network.

    Raises:
        ServerError: It cannot be run, or has no Python.
    """
    run = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", reference]
    return _answer(run, modules, _SOFTWARE_DEADLINE_S)


def _answer(python: list[str], modules: Sequence[str], deadline_s: float) -> Software:
    output = run_command([*python, "-c", _QUESTION, *modules], deadline_s)
    if output.problem:
        raise ServerError(f"{' '.join(python)} does not answer: {output.problem}")
    answer = json.loads(output.lines[-1])
    return Software(**{**answer, "missing": tuple(answer["missing"])})
