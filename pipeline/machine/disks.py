"""File systems: what is free for the store and for temporary files, what kind they are, and /dev/shm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "fuse.glusterfs", "fuse.s3fs", "9p"}


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a folder lies on, or will lie on."""

    folder: str  # the one that was asked about
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
    """Of a folder that need not exist yet: its nearest parent counts. `root`: where proc/ lies."""
    there = folder.expanduser().absolute()
    try:
        while not there.exists():
            there = there.parent
        space, device = os.statvfs(there), there.stat().st_dev
    except OSError as error:
        return Disk(str(folder), 0, 0, 0, None, "", False, False, f"{there}: {error.strerror}")
    kind, options = _mounted(there.resolve(), root)
    return Disk(
        folder=str(folder),
        device=device,
        total_bytes=space.f_frsize * space.f_blocks,
        free_bytes=space.f_frsize * space.f_bavail,
        free_files=space.f_favail if space.f_files else None,
        kind=kind,
        writable=os.access(there, os.W_OK),
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
    found, kind, options = Path(), "", set[str]()
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind, options
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if folder.is_relative_to(point) and len(point.parts) >= len(found.parts):
            found, (kind, _, *more) = point, after.split()
            options = {
                part.partition("=")[0] for text in (before.split()[5], *more) for part in text.split(",")
            }
    return kind, options
