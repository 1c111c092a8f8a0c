"""What the control groups of this process leave it: memory and processor time of a container, versions 1 and 2.

A limit holds for a group and all below it, so every group from this process's own up to the root counts. In a container
the kernel may name a path that lies outside what is mounted there; the mounted root is then the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 62  # version 1 writes a number near 2^63 for "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit, or none that can be seen."""

    memory_bytes: int | None  # that all processes of the group may use together
    memory_left_bytes: int | None  # of it, file cache that can be dropped counted as left
    cpus: float | None  # processor time, in processors


def read_limits(root: Path = Path("/")) -> Limits:
    """Those of this process. `root`: where proc/ and sys/ lie."""
    memory, processor = list(_groups(root, "memory")), list(_groups(root, "cpu"))
    limits = [
        (limit, limit - _used(group)) for group in memory if (limit := _memory_limit(group)) is not None
    ]
    cpus = [share for group in processor if (share := _cpus(group)) is not None]
    return Limits(
        memory_bytes=min((limit for limit, _ in limits), default=None),
        memory_left_bytes=max(0, min(left for _, left in limits)) if limits else None,
        cpus=min(cpus, default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, its own first, as far as they are mounted."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
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
    """What the kernel says; nothing where it does not."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
