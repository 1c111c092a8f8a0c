"""Machines: one that fits, and what keeps others from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.plan.machine_facts import (
    DiskFacts,
    DockerFacts,
    GpuFacts,
    GpuLink,
    MachineFacts,
    SoftwareFacts,
)  # fmt: skip
from tests.support.preflight.case import AWQ, FP8, LLAMA_70B, TINY, TO_PYTORCH, TP, Case

GIB = 2**30
H100 = GpuFacts(0, "NVIDIA H100 80GB HBM3", 90, 81559, 81000, "590.44.01")
FOUR = tuple(replace(H100, index=index) for index in range(4))
NVLINKS = {(number, other): GpuLink("NV", 18) for number in range(4) for other in range(number + 1, 4)}
FITTING = MachineFacts(
    gpus=FOUR,
    links=NVLINKS,
    store=DiskFacts("/store", 1, 1000 * GIB),
    temporary=DiskFacts("/tmp", 1, 100 * GIB),
    memory_bytes=1024 * GIB,
    memory_available_bytes=1000 * GIB,
    shm_bytes=64 * GIB,
    memlock_limited=False,
    mpi_slots=64,
    is_root=False,
    taken_ports=frozenset({9000}),
    docker=DockerFacts("28.0", gpu_runtime=True),
    software=SoftwareFacts("1.2.1", "10.14.1.48", "26.07"),
)
H200_TP4 = ("runtime.gpu=h100-sxm-80g", f"{TP}=4")
BF16 = ("runtime.precision=bf16",)
HOST_CACHE = ("kv_cache.host_memory_gib=100",)


def case(
    rule: str, says: Any, recipe: str = LLAMA_70B, overrides: tuple[str, ...] = H200_TP4, **changes: Any
) -> Case:
    """A fitting machine, changed."""
    return Case(rule, says, recipe, overrides, machine=replace(FITTING, **changes))


def gpus(**changes: Any) -> tuple[GpuFacts, ...]:
    return (replace(H100, **changes), *FOUR[1:])


def installed(*programs: str) -> SoftwareFacts:
    return SoftwareFacts("1.2.1", "10.14.1.48", "26.07", programs=frozenset(programs))


CASES = [
    case("port.arch", None),
    case("port.arch", "error", gpus=gpus(name="NVIDIA A100-SXM4-80GB", sm=80)),
    case("port.arch", None, gpus=(*FOUR, replace(H100, index=4, sm=75))),  # it would not be used
    case("host.gpus", None, gpus=FOUR),
    case("host.gpus", "error", gpus=FOUR[:3]),
    case("host.gpus", "error", gpus=(), gpu_problem="there is no nvidia-smi"),
    case("host.gpus", None, gpus=None),  # nobody looked
    case("host.gpu_memory", None, gpus=gpus(memory_mib=76_666, free_mib=76_000)),  # ECC takes some
    case("host.gpu_memory", "error", gpus=gpus(memory_mib=76_665, free_mib=76_000)),
    case("host.gpu_memory", None, gpus=gpus(free_mib=81559 - 2048)),
    case("host.gpu_memory", "warning", gpus=gpus(free_mib=81559 - 2049)),
    case("host.nvlink", None),
    case("host.nvlink", "warning", links={**NVLINKS, (1, 3): GpuLink("SYS")}),
    case("host.nvlink", None, FP8, (), links={**NVLINKS, (1, 3): GpuLink("SYS")}),  # one GPU
    case("host.nvlink", None, overrides=(H200_TP4[0], f"{TP}=2"), links={**NVLINKS, (1, 3): GpuLink("SYS")}),
    case("host.driver", None, gpus=gpus(driver="590.48")),
    case("host.driver", "error", gpus=gpus(driver="580.95.05")),
    case("port.version", None),
    case("port.version", None, software=SoftwareFacts()),  # nothing is installed
    case("port.version", "error", software=SoftwareFacts("1.2.0", "10.14.1.48")),
    case("port.version", "error", software=SoftwareFacts("1.2.1", "10.14.2.1")),
    case("port.version", None, FP8, TO_PYTORCH, software=SoftwareFacts("1.2.1", "10.14.2.1")),  # no engines
    case("host.container", None),
    case("host.container", "warning", software=SoftwareFacts("1.2.1", "10.14.1.48", "26.04")),
    case("host.memory", None, TINY, (), memory_bytes=GIB, memory_available_bytes=GIB),
    case("host.memory", "error", FP8, HOST_CACHE, memory_bytes=99 * GIB),
    case("host.memory", None, FP8, HOST_CACHE, memory_bytes=101 * GIB, memory_available_bytes=100 * GIB),
    case("host.memory", "warning", FP8, HOST_CACHE, memory_bytes=101 * GIB, memory_available_bytes=99 * GIB),
    case("host.memory", "warning", AWQ, (), memory_bytes=6 * GIB),  # a worker of the builder
    case("host.calibration", None, FP8, (), gpus=gpus(free_mib=20_000)[:1]),
    case("host.calibration", "warning", FP8, (), gpus=gpus(free_mib=15_000)[:1]),
    case("host.calibration", "error", FP8, (), gpus=gpus(free_mib=10_000)[:1], memory_available_bytes=4 * GIB),
    case("host.calibration", None, FP8, (), gpus=(), memory_available_bytes=30 * GIB),
    case("host.calibration", "error", FP8, (), gpus=(), memory_available_bytes=29 * GIB),
    case("host.calibration", None, "mixtral-8x7b", (), gpus=(), memory_available_bytes=GIB),  # as it is
    case("host.bf16", None, TINY, BF16, bf16=True),
    case("host.bf16", None, TINY, BF16),  # nothing is known of it
    case("host.bf16", None, TINY, (), bf16=False),
    case("host.bf16", "error", TINY, BF16, bf16=False),
    case("port.chip", None),
    case("port.chip", "warning", gpus=gpus(name="NVIDIA H200", memory_mib=143771, free_mib=143000)),
    case("host.programs", None, software=installed("/opt/tritonserver/bin/tritonserver", "mpirun")),
    case("host.programs", "error", software=installed("/opt/tritonserver/bin/tritonserver")),
    case("host.programs", None, FP8, (), software=installed("/opt/tritonserver/bin/tritonserver")),  # one rank
    case("host.modules", None),
    case("host.modules", "error", software=SoftwareFacts("1.2.1", "10.14.1.48", missing=("grpc",))),
    case("host.disk", None, FP8, (), store=DiskFacts("/store", 1, 60 * GIB)),
    case("host.disk", "error", FP8, (), store=DiskFacts("/store", 1, 30 * GIB)),
    case("host.disk", None, FP8, (), store=DiskFacts("/store", 1, 30 * GIB, held_bytes=30 * GIB)),  # it is built
    case("host.temporary", None, TINY, (), temporary=DiskFacts("/tmp", 1, GIB)),
    case("host.temporary", "error", TINY, (), temporary=DiskFacts("/tmp", 1, GIB - 1)),
    case("host.shm", None, shm_bytes=3584 * 2**20),
    case("host.shm", "warning", shm_bytes=3583 * 2**20),
    case("host.shm", "warning", shm_bytes=GIB),
    case("host.shm", "error", shm_bytes=GIB - 1),
    case("host.shm", "warning", FP8, (), shm_bytes=GIB - 1),  # one rank
    case("host.memlock", None),
    case("host.memlock", "warning", memlock_limited=True, memlock_bytes=8192 << 10),
    case("host.memlock", None, FP8, (), memlock_limited=True, memlock_bytes=8192 << 10),
    case("host.ports", None),
    case("host.ports", "note", taken_ports=frozenset({8001})),
    case("host.docker", None),
    case("host.docker", None, software=None),
    case("host.docker", "warning", software=None, docker=DockerFacts(None, problem="no such program")),
    case("host.docker", "warning", software=None, docker=DockerFacts("28.0", gpu_runtime=False)),
    case("host.docker", None, docker=DockerFacts(None)),  # the release is installed here
    case("mpi.slots", None, mpi_slots=4),
    case("mpi.slots", "note", mpi_slots=3),
    case("mpi.root", None),
    case("mpi.root", "note", is_root=True),
    case("mpi.root", None, FP8, (), is_root=True),
    case("mpi.orchestrator", None, FP8, ()),
    case("mpi.orchestrator", "error", FP8, (), batch_system="Slurm"),
    case("mpi.orchestrator", None, FP8, ("draft=null",), batch_system="Slurm"),
]  # fmt: skip
