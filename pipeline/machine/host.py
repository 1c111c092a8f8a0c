"""Memory, processors, limits and disks of this host, with what control groups leave a container of it.

A limit of a control group (version 1 or 2) holds for a group and all below it, so every group from this process's own
up to the root counts. In a container the kernel may name a path that lies outside what is mounted there; the mounted
root is then the container's own group.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# As the kernel names what OpenVINO computes in bf16 with: any one of these, or both of those.
_BF16, _BF16_AVX2 = frozenset({"avx512_bf16", "amx_bf16"}), frozenset({"avx_ne_convert", "avx_vnni_int8"})


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine, or of the container where that is less."""

    total_bytes: int
    available_bytes: int  # without swapping
    swap_bytes: int
    limit_bytes: int | None  # of the container; None: it has none


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors that this process may use."""

    threads: int  # hardware threads
    cores: int  # which mpirun counts as slots
    quota: float | None  # processors' worth of time that the container may use; None: any
    bf16: bool | None = None  # whether they have arithmetic for it; None: not known, as of others than x86


@dataclass(frozen=True, slots=True)
class Ulimits:
    """Soft limits; None: unlimited."""

    memlock_bytes: int | None
    open_files: int | None
    stack_bytes: int | None


def read_memory(limits: CgroupLimits | None = None, root: Path = _ROOT) -> Memory:
    """Read the memory that this process sees; `root` holds proc/ and sys/."""
    limits = limits or read_limits(root)
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
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


def read_processors(limits: CgroupLimits | None = None, root: Path = _ROOT) -> Processors:
    """Read the processors that this process may use; `root` holds proc/ and sys/."""
    allowed = os.sched_getaffinity(0)
    limits = limits or read_limits(root)
    return Processors(len(allowed), count_cores(allowed, root), limits.cpus, _has_bf16(root))


def processor_name(root: Path = _ROOT) -> str:
    """Name of this machine's processor, or its architecture where the kernel gives no name."""
    return _cpuinfo("model name", root) or platform.machine()


def _has_bf16(root: Path) -> bool | None:
    flags = _cpuinfo("flags", root).split()
    return not _BF16.isdisjoint(flags) or _BF16_AVX2.issubset(flags) if flags else None


def _cpuinfo(key: str, root: Path) -> str:
    """Read a key of the first processor in /proc/cpuinfo; empty if it is not there."""
    for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key and value.strip():
            return value.strip()
    return ""


def count_cores(threads: set[int], root: Path = _ROOT) -> int:
    """Cores that these hardware threads belong to; at least one."""
    return max(1, len({_core(number, root) for number in threads}))


def _core(number: int, root: Path) -> tuple[str, ...]:
    """Identity of a core; for a processor that the kernel does not describe, its number."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    try:
        return tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (str(number),)


def mpi_slots() -> int:
    """Slots of an mpirun without a host file: cores (not threads) that this process may run on."""
    return count_cores(os.sched_getaffinity(0))


def read_ulimits() -> Ulimits:
    """Read the limits of this process, which its children inherit."""
    return Ulimits(
        _soft(resource.RLIMIT_MEMLOCK), _soft(resource.RLIMIT_NOFILE), _soft(resource.RLIMIT_STACK)
    )


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


_JOBS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}


def batch_system(environment: Mapping[str, str] = os.environ) -> str | None:
    """Batch scheduler (Slurm, PBS, LSF) that runs this process, by the variable that it sets; None if there is none."""
    return next((name for variable, name in _JOBS.items() if environment.get(variable)), None)


_NO_LIMIT = 1 << 62  # version 1 writes a number near 2^63 for "none"


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of this process's control groups; None: no limit, or none that can be seen."""

    memory_bytes: int | None  # that all processes of the group may use together
    memory_left_bytes: int | None  # of it, file cache that can be dropped counted as left
    cpus: float | None  # processor time, in processors


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """Read the limits of this process; `root` holds proc/ and sys/."""
    memory, processor = list(_groups(root, "memory")), list(_groups(root, "cpu"))
    limits = [
        (limit, limit - _used(group)) for group in memory if (limit := _memory_limit(group)) is not None
    ]
    cpus = [share for group in processor if (share := _cpus(group)) is not None]
    return CgroupLimits(
        memory_bytes=min((limit for limit, _ in limits), default=None),
        memory_left_bytes=max(0, min(left for _, left in limits)) if limits else None,
        cpus=min(cpus, default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, its own first, as far as they are mounted."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, fields = line.partition(":")
        names, _, path = fields.partition(":")
        if number == "0" and not names:
            base = mounted
        elif controller in names.split(","):
            base = next((b for b in (mounted / names, mounted / controller) if b.is_dir()), mounted / names)
        else:
            continue
        own = base / path.strip("/")
        group = own if own.is_dir() else base
        while True:
            yield group
            if group == base:
                break
            group = group.parent


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _text(group / name)
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def _used(group: Path) -> int:
    used = next(
        (int(t) for n in ("memory.current", "memory.usage_in_bytes") if (t := _text(group / n)).isdigit()), 0
    )
    stat = dict(line.split()[:2] for line in _text(group / "memory.stat").splitlines() if line)
    dropped = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return used - min(used, dropped)


def _cpus(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():
        return None  # "max", "-1", or no such controller
    return int(quota) / int(period)


def _text(file: Path) -> str:
    """Content of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "fuse.glusterfs", "fuse.s3fs", "9p"}


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a folder lies on, or will lie on."""

    folder: str  # as the caller named it
    device: int  # st_dev: two folders of one file system share what is free
    total_bytes: int
    free_bytes: int  # for this user, reserved blocks and quotas of the file system taken off
    free_files: int | None  # None: the file system has no such limit
    kind: str  # "ext4"; "" where the kernel does not say
    writable: bool
    quota: bool  # mounted with quotas, which may leave less than is free
    problem: str = ""  # why nothing is known

    @property
    def network(self) -> bool:
        """Whether other machines see the same files."""
        return self.kind in _NETWORK


def read_disk(folder: Path, root: Path = _ROOT) -> Disk:
    """Read the file system of a folder, or of its nearest parent that exists; `root` holds proc/."""
    path = folder.expanduser().absolute()
    try:
        while not path.exists():
            path = path.parent
        space, device = os.statvfs(path), path.stat().st_dev
    except OSError as error:
        return Disk(str(folder), 0, 0, 0, None, "", False, False, f"{path}: {error.strerror}")
    kind, options = _mounted(path.resolve(), root)
    return Disk(
        folder=str(folder),
        device=device,
        total_bytes=space.f_frsize * space.f_blocks,
        free_bytes=space.f_frsize * space.f_bavail,
        free_files=space.f_favail if space.f_files else None,
        kind=kind,
        writable=os.access(path, os.W_OK),
        quota=bool({"quota", "usrquota", "grpquota", "prjquota", "uquota", "pquota"} & options),
    )


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm; None where there is none."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return None
    return space.f_frsize * space.f_blocks


def _mounted(folder: Path, root: Path) -> tuple[str, set[str]]:
    """Kind and options of the file system, by the longest mount point that the folder lies below."""
    mount, kind, options = Path(), "", set[str]()
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind, options
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if folder.is_relative_to(point) and len(point.parts) >= len(mount.parts):
            mount, (kind, _, *more) = point, after.split()
            options = {
                part.partition("=")[0] for text in (before.split()[5], *more) for part in text.split(",")
            }
    return kind, options
