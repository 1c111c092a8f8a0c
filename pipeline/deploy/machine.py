"""What a machine (or the container that this runs in) has of what a deployment needs. It reads; it judges nothing.

Nothing heavy is imported: versions come from the metadata of installed distributions, GPUs from `nvidia-smi`.
"""

from __future__ import annotations

import csv
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from pipeline.triton.native_launch import mpi_slots

_QUERY = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
_NVIDIA_SMI_DEADLINE_S = 30
_TENSORRT = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")  # distributions that hold it


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """One GPU, as the driver reports it."""

    index: int
    uuid: str
    name: str  # "NVIDIA H100 80GB HBM3"
    sm: int  # 90 for compute capability 9.0
    memory_mib: int
    free_mib: int
    driver: str  # "590.44.01"


@dataclass(frozen=True, slots=True)
class Software:
    """What would serve."""

    tensorrt_llm: str | None
    tensorrt: str | None
    release: str | None  # of the Triton container: "26.07"
    programs: frozenset[str] | None = (
        None  # of those that were asked for, the ones that are there; None: unknown
    )
    own: bool = False  # whether it is that of this process, whose limits then count, too


@dataclass(frozen=True, slots=True)
class Machine:
    """All that is checked before anything large is loaded."""

    gpus: tuple[GpuSeen, ...]
    gpu_problem: str  # why there are no GPUs to see; empty if there are
    software: Software | None  # None: another place serves, such as an image
    shm_mib: int  # size of /dev/shm
    memlock_kib: int | None  # memory that a process may lock; None: any amount
    slots: int  # of mpirun
    disk_free_gib: float  # where temporary files go
    root: bool

    @classmethod
    def here(cls, *, programs: tuple[str, ...] = (), devices: tuple[int, ...] = ()) -> Machine:
        """This machine. `programs`: names or paths to look for; `devices`: GPUs that may be used, empty for all."""
        gpus, problem = read_gpus()
        return cls(
            gpus=visible(gpus, devices, os.environ),
            gpu_problem=problem,
            software=read_software(programs, os.environ),
            shm_mib=shutil.disk_usage("/dev/shm").total >> 20,
            memlock_kib=_memlock_kib(),
            slots=mpi_slots(),
            disk_free_gib=shutil.disk_usage(tempfile.gettempdir()).free / 2**30,
            root=os.geteuid() == 0,
        )

    def with_software(self, software: Software | None) -> Machine:
        """This machine, with something else that serves."""
        return replace(self, software=software)


def read_gpus() -> tuple[tuple[GpuSeen, ...], str]:
    """All GPUs of the machine, and why there are none to see if that is so."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "there is no nvidia-smi: no driver, or a container that was started without --gpus"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi failed: {error}"
    if done.returncode:
        return (), f"nvidia-smi failed: {(done.stdout + done.stderr).strip() or done.returncode}"
    try:
        rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
        gpus = tuple(_gpu(row) for row in rows if row)
    except ValueError as error:
        return (), f"nvidia-smi says what cannot be read ({error}): {done.stdout.strip()!r}"
    return gpus, "" if gpus else "nvidia-smi lists no GPU"


def _gpu(row: list[str]) -> GpuSeen:
    index, uuid, name, capability, total, free, driver = (field.strip() for field in row)
    major, _, minor = capability.partition(".")
    return GpuSeen(int(index), uuid, name, int(major) * 10 + int(minor), int(total), int(free), driver)


def visible(
    gpus: tuple[GpuSeen, ...], devices: tuple[int, ...], environment: Mapping[str, str]
) -> tuple[GpuSeen, ...]:
    """Those GPUs that a process sees: the devices that were asked for, or what CUDA_VISIBLE_DEVICES leaves."""
    if devices:
        return tuple(gpu for gpu in gpus if gpu.index in devices)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return tuple(
        gpu for gpu in gpus for name in names if str(gpu.index) == name or gpu.uuid.startswith(f"{name}")
    )


def read_software(programs: tuple[str, ...], environment: Mapping[str, str]) -> Software:
    """What is installed beside this process."""
    return Software(
        tensorrt_llm=_version("tensorrt-llm"),
        tensorrt=next((version for name in _TENSORRT if (version := _version(name))), None),
        release=environment.get("NVIDIA_TRITON_SERVER_VERSION"),
        programs=frozenset(name for name in programs if shutil.which(name) is not None),
        own=True,
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _memlock_kib() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft >> 10
