"""Stand-ins for Docker and for mpirun, set up to run the real Triton."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from pipeline.serving.launch import Launcher
from pipeline.serving.launch_embedded import Installation
from pipeline.serving.launch_gpu import GpuPlace, gpu_launch
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.builders import FakeDocker
from tests.support.deployments import gpu_deployment

_SERVER = """#!{python}
import json, os, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
with open({folder!r} + f"/rank{{rank}}.json", "w") as file:
    json.dump({{"arguments": sys.argv[1:], "pid": os.getpid()}}, file)
if rank == 0:
    {first}
    options = ["--backend-directory=" + {backends!r}, "--cache-directory=" + {caches!r}]
    os.execv({binary!r}, [{binary!r}, *sys.argv[1:], *options])
{other}
while True:
    time.sleep(1)
"""


def _triton_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Link the embedded Triton's backend below the folder, and put its libraries on the paths; the paths of Triton."""
    installation = Installation.find()
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (*installation.backend.iterdir(), installation.stub):
        (backend / file.name).symlink_to(file.resolve())
    for name, value in installation.environment().items():
        if name in ("PATH", "LD_LIBRARY_PATH"):
            monkeypatch.setenv(name, value)
    caches, binary = str(installation.caches), str(installation.binary)
    return {"binary": binary, "backends": str(backend.parent), "caches": caches}


def serving_docker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """A Docker whose containers run the real Triton."""
    triton = _triton_below(folder, monkeypatch)
    docker = FakeDocker(folder, monkeypatch)
    docker.set(server=triton)
    return docker


def two_ranks(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, first: str = "pass", other: str = ""
) -> Launcher:
    """A launcher of two ranks below a stand-in mpirun; what each was given is in `folder/rank<N>.json`.

    Rank 0 is the real Triton with a package for the CPU. Rank 1 stays, as a rank of TensorRT-LLM does.
    `first`, `other`: a line of Python that rank 0 or rank 1 runs before it serves or waits.
    """
    folder.mkdir(exist_ok=True)
    triton = _triton_below(folder, monkeypatch)
    programs = folder / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    server = folder / "tritonserver"
    server.write_text(
        _SERVER.format(python=sys.executable, folder=str(folder), first=first, other=other, **triton)
    )
    server.chmod(0o755)
    # Of Open MPI, where there is one.
    if real := os.environ.get("PIPELINE_TEST_MPIRUN"):
        (programs / "mpirun").write_text(f'#!/bin/sh\nexec {shlex.quote(real)} "$@"\n')
    else:
        shutil.copy(Path(__file__).with_name("mpirun"), programs / "mpirun")
    (programs / "mpirun").chmod(0o755)
    assert shlex.quote(str(folder)) == str(folder)
    return partial(gpu_launch, leader_of(package), package, place=GpuPlace(server=str(server)))


def leader_of(package: Path) -> Deployment:
    """The deployment of a package for the CPU, as if its engine had two ranks."""
    real = Deployment.load(package)
    launch = LaunchSpec(mode="leader", world_size=2, engine_models=("tensorrt_llm",))
    pretended = gpu_deployment(launch, gpus=2)
    return real.model_copy(
        update={"runtime": "tensorrt", "requirements": pretended.requirements, "launch": launch}
    )
