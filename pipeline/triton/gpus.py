"""The GPUs of this machine, as its driver reports them through `nvidia-smi`. It reads; it judges nothing."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_QUERY = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
_DEADLINE_S = 30


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """One GPU."""

    index: int
    uuid: str
    name: str  # "NVIDIA H100 80GB HBM3"
    sm: int  # 90 for compute capability 9.0
    memory_mib: int
    free_mib: int
    driver: str  # "590.44.01"


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
            timeout=_DEADLINE_S,
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
