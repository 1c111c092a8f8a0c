"""Facts about a machine, as far as a rule judges it, and the GPU of the contracts that a driver's name means.

Plain values; `pipeline.machine` gathers them. None means that it was not looked at, or could not be found out; a rule
that needs it then says nothing, so that a plan made on a laptop is not judged by the laptop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.contracts.gpus import Gpu, gpus

# How two GPUs reach each other, as `nvidia-smi topo -m` abbreviates it, nearest first.
#   NV   NVLink (NV# of the table: # is the number of links, kept in `GpuLink.lanes`)
#   PIX  one PCIe switch, PXB several, PHB over the CPU's own PCIe bridge, NODE within a NUMA node, SYS between sockets
Path = Literal["NV", "PIX", "PXB", "PHB", "NODE", "SYS"]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, as its driver reports it."""

    index: int
    name: str  # "NVIDIA H100 80GB HBM3"
    sm: int  # 90 for compute capability 9.0
    memory_mib: int
    free_mib: int
    driver: str  # "590.44.01"
    uuid: str = ""

    @property
    def capability(self) -> str:
        """Compute capability, such as "9.0"."""
        return f"{self.sm // 10}.{self.sm % 10}"


@dataclass(frozen=True, slots=True)
class GpuLink:
    """The way between two GPUs."""

    path: Path
    lanes: int = 0  # NVLinks bonded; 0 where the path is not NV


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The file system that a folder lies on."""

    folder: str  # the folder that was asked about
    device: int  # st_dev: two folders of one file system share what is free
    free_bytes: int
    held_bytes: int = 0  # by artifacts of the recipe that is judged, which need not be made again


@dataclass(frozen=True, slots=True)
class DockerFacts:
    """The container engine, if there is one that answers."""

    version: str | None  # of the daemon; None: it does not answer
    gpu_runtime: bool | None = None  # whether containers may be given GPUs; None: unknown
    problem: str = ""  # why it does not answer
    fix: str = ""  # what would help
    gpu_how: str = ""  # "nvidia runtime" | "CDI" | "nvidia hook"
    rootless: bool = False
    folder: str | None = None  # where the daemon keeps images


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """The software that would execute the engines: the Python that Triton's models run in, here or in an image."""

    tensorrt_llm: str | None = None  # None: not installed
    tensorrt: str | None = None
    release: str | None = None  # of the Triton container, by its NVIDIA_TRITON_SERVER_VERSION: "26.07"
    missing: tuple[str, ...] = ()  # modules that the models import and that are not there
    programs: frozenset[str] | None = None  # that a launch runs, and that are there; None: unknown
    own: bool = False  # whether it is this machine's own, whose limits then count, too


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine, or the container that this runs in."""

    gpus: tuple[GpuFacts, ...] | None = None  # those that may be used; (): there are none
    gpu_problem: str = ""  # why there are none
    links: Mapping[tuple[int, int], GpuLink] | None = None  # (lower index, higher index) -> way
    store: DiskFacts | None = None  # where artifacts go
    temporary: DiskFacts | None = None  # where scratch files go
    memory_bytes: int | None = None  # of the host
    memory_available_bytes: int | None = None  # of it, without swapping
    shm_bytes: int | None = None  # size of /dev/shm
    memlock_bytes: int | None = None  # that a process may lock; see memlock_limited
    memlock_limited: bool | None = None  # False: any amount
    batch_system: str | None = None  # within a job of which this runs: "Slurm"
    bf16: bool | None = None  # whether the processor has arithmetic for it
    mpi_slots: int | None = None  # ranks that mpirun starts without --oversubscribe
    is_root: bool | None = None
    taken_ports: frozenset[int] | None = None  # of those that a server would listen on
    docker: DockerFacts | None = None
    software: SoftwareFacts | None = None
    hub: Mapping[str, int] = field(default_factory=dict)  # repository -> HTTP status of its config.json


def contract_name(device: GpuFacts) -> str | None:
    """Find the name that the contracts have for a GPU.

    Returns:
        The product with the same compute capability, whose chip is in the driver's name, with the nearest memory;
        None if there is none.
    """
    pcie = "pcie" in _words(device.name)
    fitting = [known for known in gpus() if known.sm == device.sm and has_chip_name(device, known)]
    nearest = min(
        fitting,
        key=lambda known: (abs(known.driver_mib - device.memory_mib), pcie != ("pcie" in _words(known.name))),
        default=None,
    )
    return nearest.name if nearest else None


def has_chip_name(device: GpuFacts, known: Gpu) -> bool:
    """Tell whether the name that a driver reports has all words of a product's chip."""
    return set(_words(known.chip)) <= set(_words(device.name))


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower())
