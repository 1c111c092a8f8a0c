"""What a machine (or the container that this runs in) has of what a deployment needs. It reads; it judges nothing.

GPUs are what `nvidia-smi` says. What would serve on it is asked elsewhere (`pipeline.deploy.software`).
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from dataclasses import dataclass

from pipeline.machine.gpus import GpuSeen, read_gpus, visible
from pipeline.machine.software import Software


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
    def here(
        cls, software: Software | None, *, devices: tuple[int, ...] = (), look_for_gpus: bool = True
    ) -> Machine:
        """This machine. `software`: what would serve; `devices`: GPUs that may be used, empty for all."""
        gpus, problem = read_gpus() if look_for_gpus else ((), "")
        return cls(
            gpus=visible(gpus, devices, os.environ),
            gpu_problem=problem,
            software=software,
            shm_mib=shutil.disk_usage("/dev/shm").total >> 20,
            memlock_kib=_memlock_kib(),
            disk_free_gib=shutil.disk_usage(tempfile.gettempdir()).free / 2**30,
        )


def _memlock_kib() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft >> 10
