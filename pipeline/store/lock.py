"""Locks on names, held by processes: `flock` on a small file for each name.

The kernel drops a lock when its holder dies, also by `kill -9`, so there is nothing to expire. An exclusive
lock is held while an artifact is made or removed; a shared one by whoever uses it. The file says who held
it exclusively last, for the message to those who wait. On NFS `flock` reaches across hosts; a filesystem
without it is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.reading import UnreadableFile, read_json

_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class Holder:
    """The process that a lock's file names."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """A held lock; `release` (or the end of the process) ends it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor: a child process that inherits it (`pass_fds`) holds the lock on."""
        return self._descriptor

    def release(self, *, unlink: bool = False) -> None:
        """Let go; with `unlink` (only when held exclusively) the file goes too."""
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def exclusive(path: Path) -> Lock | None:
    """Take a lock alone; return None if anyone else holds it."""
    lock = _take(path, fcntl.LOCK_EX)
    if lock is not None:
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), text.encode(), 0)
    return lock


def shared(path: Path) -> Lock | None:
    """Take a lock beside other users; return None while somebody makes or removes what it protects."""
    return _take(path, fcntl.LOCK_SH)


def holder(path: Path) -> Holder | None:
    """Read from a lock's file which process took it exclusively last; None if the file does not tell."""
    try:
        raw = read_json(path)
        return Holder(pid=raw["pid"], host=raw["host"])
    except (UnreadableFile, KeyError):  # gone, or not yet written
        return None


def _take(path: Path, mode: int) -> Lock | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return Lock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                raise StoreError(
                    f"{path.parent}: this filesystem has no locks ({error.strerror}), so two builders could "
                    "collide; set PIPELINE_STORE to a directory on ext4, xfs, btrfs, tmpfs or NFS 4"
                ) from error
            raise
        os.close(descriptor)  # a collector removed the file between opening and locking: take the new file
