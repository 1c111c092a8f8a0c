"""Machines of a test's choice: as `pipeline.machine` finds them, and by the programs on their PATH."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.machine.docker import Docker
from pipeline.machine.gpus import DetectedGpu, GpuSurvey, Link, Topology
from pipeline.machine.host import Disk, Memory, Processors, Ulimits
from pipeline.machine.inventory import Inventory
from pipeline.machine.network import Hub
from pipeline.machine.programs import EngineBuilder, Mpi, Software, TritonProgram

GIB = 1 << 30
H100 = DetectedGpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 90, 81559, 81000, "590.44.01")
DISK = Disk("/data/store", 7, 4096 * GIB, 4000 * GIB, 1_000_000, "xfs", writable=True, quota=False)


def h100s(count: int, way: str = "NV") -> Inventory:
    """A host with Docker and H100s, whose hub answers; nothing of TensorRT-LLM is installed on it."""
    gpus = tuple(replace(H100, index=index, uuid=f"GPU-{index}") for index in range(count))
    pairs = [(number, two) for number in range(count) for two in range(number + 1, count)]
    links = tuple(Link(pair, "NV", 18) if way == "NV" else Link(pair, "SYS") for pair in pairs)
    return Inventory(
        gpus=GpuSurvey(gpus, "", "NVML", "13.1"),
        topology=Topology(links),
        memory=Memory(1024 * GIB, 1000 * GIB, 0, None),
        processors=Processors(64, 32, None),
        ulimits=Ulimits(None, 1 << 20, 64 << 20),
        store=DISK,
        temporary=replace(DISK, folder="/tmp"),
        shm_bytes=64 * GIB,
        docker=Docker("28.3.2", gpu_runtime=True, gpu_how="nvidia runtime", folder="/var/lib/docker"),
        mpi=Mpi("Open MPI", "4.1.8"),
        triton=TritonProgram(None, None, None),
        software=Software(None, None, None),
        builder=EngineBuilder(None, None),
        hub=Hub("https://huggingface.co", offline=False, token="HF_TOKEN", clock_ahead_s=0.4),
        listeners={},
    )


HANGS = "while True: time.sleep(60)"


def put_tool(
    folder: Path, name: str, says: str = "", *, complains: str = "", code: int = 0, does: str = ""
) -> Path:
    """A program in `folder`. `does`: Python that it runs first, such as HANGS, with `arguments` at hand."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(
        f"#!{sys.executable} -IS\n"
        "import os, subprocess, sys, time\n"
        "arguments = sys.argv[1:]\n"
        f"{does}\n"
        f"sys.stdout.write({says!r})\nsys.stderr.write({complains!r})\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    return program


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> None:
    """First on PATH from now on; answers our query with GPUs of a test's choice."""
    query = "--query-gpu=index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
    asked = [query, "--format=csv,noheader,nounits"]
    put_tool(folder, "nvidia-smi", f"{text}\n", code=code, does=f"assert arguments[:2] == {asked}, arguments")
    if str(folder) not in os.environ["PATH"].split(os.pathsep):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def line(
    index: int = 0,
    name: str = "NVIDIA H100 80GB HBM3",
    capability: str = "9.0",
    total: int = 81559,
    free: int = 81000,
    driver: str = "590.44.01",
) -> str:
    """Output of nvidia-smi for one GPU."""
    return f"{index}, GPU-{index}abc, {name}, {capability}, {total}, {free}, {driver}"
