"""Programs that deployments need: mpirun, and Triton and TensorRT-LLM where they are installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.machine.probe import ask

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
    """What `mpirun --version` says."""
    said = ask(["mpirun", "--version"], deadline_s)
    if said.problem:
        return Mpi(None, None, said.problem)
    for family, pattern in _FAMILIES:
        match = pattern.search(said.text)
        if match is not None:
            return Mpi(family, match[1])
    return Mpi(None, None, f"mpirun does not say whose it is: {said.text.strip()[:80]!r}")


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
    said = ask([*python, "-c", _TENSORRT_LLM], deadline_s)
    return said.text.strip() or None


def _interpreter(script: Path) -> list[str] | None:
    """The Python of a script's first line; pip writes `#!/bin/sh` and `exec` where its path is too long for that."""
    with script.open("rb") as file:
        first, second = (file.readline().decode(errors="replace").strip() for _ in range(2))
    if not first.startswith("#!"):
        return None
    words = shlex.split(first[2:])
    if words and Path(words[0]).name == "sh" and second.startswith("'''exec' "):
        words = shlex.split(second.removeprefix("'''exec' "))[:1]
    return words if any("python" in Path(word).name for word in words) else None
