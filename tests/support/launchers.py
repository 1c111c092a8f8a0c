"""Stand-ins for Docker and for mpirun, set up to run the real Triton."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.serving.launch import Launcher
from pipeline.serving.launch_embedded import Installation
from pipeline.serving.launch_gpu import GpuPlace, gpu_launch
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment

DIGEST = "sha256:" + "ab" * 32

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


def _put_programs(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Put the stand-in of a name on PATH, and the embedded Triton's backend below the folder; the paths of Triton."""
    installation = Installation.find()
    backend, programs = folder / "backends" / "python", folder / "bin"
    backend.mkdir(parents=True)
    programs.mkdir()
    for file in (*installation.backend.iterdir(), installation.stub):
        (backend / file.name).symlink_to(file.resolve())
    shutil.copy(Path(__file__).with_name(name), programs / name)
    (programs / name).chmod(0o755)
    environment = installation.environment()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{environment['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", environment["LD_LIBRARY_PATH"])
    caches, binary = str(installation.caches), str(installation.binary)
    return {"binary": binary, "backends": str(backend.parent), "caches": caches}


class StandInDocker:
    """Has images, here or in a registry. What it was called with is in `calls`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.programs = folder, folder / "bin"
        server = _put_programs(folder, "docker", monkeypatch)
        (folder / "server.json").write_text(json.dumps(server))
        self.has({})
        self.can_pull({})
        monkeypatch.setenv("STAND_IN_DOCKER", str(folder))

    def has(self, images: dict[str, str | None]) -> None:
        """Images of this machine, with their digests."""
        (self.folder / "images.json").write_text(json.dumps(images))

    def can_pull(self, images: dict[str, str | None]) -> None:
        """Images of the registry."""
        (self.folder / "registry.json").write_text(json.dumps(images))

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls.jsonl"
        lines: list[Any] = file.read_text().splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]

    def called(self, *words: str) -> list[list[str]]:
        """Calls that begin with these words."""
        return [call for call in self.calls if call[: len(words)] == list(words)]


def two_ranks(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, first: str = "pass", other: str = ""
) -> Launcher:
    """A launcher of two ranks below a stand-in mpirun; what each was given is in `folder/rank<N>.json`.

    Rank 0 is the real Triton with a package for the CPU. Rank 1 stays, as a rank of TensorRT-LLM does.
    `first`, `other`: a line of Python that rank 0 or rank 1 runs before it serves or waits.
    """
    folder.mkdir(exist_ok=True)
    triton = _put_programs(folder, "mpirun", monkeypatch)
    server = folder / "tritonserver"
    server.write_text(
        _SERVER.format(python=sys.executable, folder=str(folder), first=first, other=other, **triton)
    )
    server.chmod(0o755)
    # Of Open MPI, where there is one.
    if real := os.environ.get("PIPELINE_TEST_MPIRUN"):
        (folder / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec {shlex.quote(real)} "$@"\n')
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
