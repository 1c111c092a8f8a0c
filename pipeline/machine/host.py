"""Memory, processors and limits of this process: what the kernel says, with what a container is left of it."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from pipeline.machine.cgroup import Limits, read_limits

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the machine, or of the container where that is less."""

    total_bytes: int
    available_bytes: int  # without swapping
    swap_bytes: int
    limit_bytes: int | None  # of the container; None: it has none


@dataclass(frozen=True, slots=True)
class Processors:
    """Those that this process may use."""

    threads: int  # hardware threads
    cores: int  # which mpirun counts as slots
    quota: float | None  # processors' worth of time that the container may use; None: any


@dataclass(frozen=True, slots=True)
class Ulimits:
    """Soft limits; None: unlimited."""

    memlock_bytes: int | None
    open_files: int | None
    stack_bytes: int | None


def read_memory(limits: Limits | None = None, root: Path = _ROOT) -> Memory:
    """Of the machine as this process sees it. `root`: where proc/ and sys/ lie."""
    limits = limits or read_limits(root)
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, available = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    limited = limits.memory_bytes is not None and limits.memory_bytes < total
    return Memory(
        total_bytes=min(total, limits.memory_bytes or total),
        available_bytes=min(
            available, available if limits.memory_left_bytes is None else limits.memory_left_bytes
        ),
        swap_bytes=kib.get("SwapTotal", 0) << 10,
        limit_bytes=limits.memory_bytes if limited else None,
    )


def read_processors(limits: Limits | None = None, root: Path = _ROOT) -> Processors:
    """Those of this process. `root`: where proc/ and sys/ lie."""
    mine = os.sched_getaffinity(0)
    limits = limits or read_limits(root)
    return Processors(len(mine), count_cores(mine, root), limits.cpus)


def count_cores(threads: set[int], root: Path = _ROOT) -> int:
    """Cores that these hardware threads belong to; at least one."""
    return max(1, len({_core(number, root) for number in threads}))


def _core(number: int, root: Path) -> tuple[str, ...]:
    """What tells cores apart; of a processor that the kernel says nothing about, its number."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    try:
        return tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (str(number),)


def mpi_slots() -> int:
    """Slots of an mpirun without a host file: cores (not threads) that this process may run on."""
    return count_cores(os.sched_getaffinity(0))


def read_ulimits() -> Ulimits:
    """Those of this process, which what it starts inherits."""
    return Ulimits(
        _soft(resource.RLIMIT_MEMLOCK), _soft(resource.RLIMIT_NOFILE), _soft(resource.RLIMIT_STACK)
    )


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
