"""What a machine (or the container that this runs in) has of what a deployment needs. It reads; it judges nothing.

GPUs are what `nvidia-smi` says. What would serve on it is asked elsewhere (`pipeline.deploy.software`).
"""

from __future__ import annotations

import csv
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.deploy.software import Software

_QUERY = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
_NVIDIA_SMI_DEADLINE_S = 30


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
class Machine:
    """All that is checked before anything large is loaded."""

    gpus: tuple[GpuSeen, ...]
    gpu_problem: str  # why there are no GPUs to see; empty if there are
    software: Software | None  # None: unknown, as of an image that is not here yet
    shm_mib: int  # size of /dev/shm
    memlock_kib: int | None  # memory that a process may lock; None: any amount
    disk_free_gib: float  # where temporary files go

    @classmethod
    def here(cls, software: Software | None, *, devices: tuple[int, ...] = ()) -> Machine:
        """This machine. `software`: what would serve; `devices`: GPUs that may be used, empty for all."""
        gpus, problem = read_gpus()
        return cls(
            gpus=visible(gpus, devices, os.environ),
            gpu_problem=problem,
            software=software,
            shm_mib=shutil.disk_usage("/dev/shm").total >> 20,
            memlock_kib=_memlock_kib(),
            disk_free_gib=shutil.disk_usage(tempfile.gettempdir()).free / 2**30,
        )


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


def _memlock_kib() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft >> 10
