"""Machines of a test's choice, as `pipeline.machine` finds them."""

from __future__ import annotations

from dataclasses import replace

from pipeline.machine.docker import Docker
from pipeline.machine.gpus import GpuSeen, GpuSurvey, Link, Topology
from pipeline.machine.host import Disk, Memory, Processors, Ulimits
from pipeline.machine.inventory import Inventory
from pipeline.machine.network import Hub
from pipeline.machine.programs import EngineBuilder, Mpi, Software, TritonProgram

GIB = 1 << 30
H100 = GpuSeen(0, "GPU-0", "NVIDIA H100 80GB HBM3", 90, 81559, 81000, "590.44.01")
DISK = Disk("/data/store", 7, 4096 * GIB, 4000 * GIB, 1_000_000, "xfs", writable=True, quota=False)


def h100s(count: int, way: str = "NV") -> Inventory:
    """A host with Docker and H100s, whose hub answers; nothing of TensorRT-LLM is installed on it."""
    gpus = tuple(replace(H100, index=index, uuid=f"GPU-{index}") for index in range(count))
    pairs = [(one, two) for one in range(count) for two in range(one + 1, count)]
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
