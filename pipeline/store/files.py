"""Directories of files: list, hash, make durable, make read-only, copy, remove.

Nothing here knows of artifacts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from pipeline.reading import open_file

_BLOCK = 1 << 20
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file (btrfs, xfs)
_NO_CLONES = {
    errno.EXDEV,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EPERM,
    errno.EBADF,
}
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Relative path (with "/") and `lstat` of all under `root` but directories, sorted.

    Passes over `__pycache__`, which Python writes beside any module that it loads, also from an artifact.
    """
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*names, *links]):
            path = os.path.join(folder, name)
            yield os.path.relpath(path, root).replace(os.sep, "/"), os.lstat(path)


def is_plain(info: os.stat_result) -> bool:
    """A file with bytes of its own, not a symbolic link, a socket or a device."""
    return stat.S_ISREG(info.st_mode)


def tree_bytes(root: Path) -> int:
    """Bytes of all files under `root`, whatever they are; another process may be changing them."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def sha256(stream: BufferedReader, advance: Callable[[float], None] | None = None) -> str:
    """SHA-256 of the rest of a file, 64 hexadecimal digits; `advance` gets the number of bytes of each read."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    while count := stream.readinto(buffer):
        digest.update(view[:count])
        if advance is not None:
            advance(count)
    return digest.hexdigest()


def sha256_all(
    root: Path,
    names: list[str],
    advance: Callable[[float], None] | None = None,
    of: Callable[[BufferedReader, str], str] | None = None,
) -> dict[str, str]:
    """Name -> SHA-256, several files at a time (hashing leaves the interpreter free).

    `of`: gives the hash of an open file and its name, where another way than reading it may do.
    """

    def of_file(name: str) -> str:
        with open_file(root / name, follow=False) as stream:
            return sha256(stream, advance) if of is None else of(stream, name)

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(of_file, names), strict=True))


def fsync(path: Path) -> None:
    """Put a file's bytes, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE filesystems have no fsync for directories.
        if not (path.is_dir() and error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}):
            raise
    finally:
        os.close(descriptor)


def make_read_only(root: Path) -> None:
    """Take the write permission from every file under `root`. What has none keeps its change time."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o222 and not path.is_symlink():
                path.chmod(mode & ~0o222)


def settle(root: Path) -> None:
    """Put all under `root` on the disk, leaves first."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))


def remove_tree(root: Path) -> None:
    """Remove a directory (or a file) whatever its permissions; nothing if it is not there."""
    if not root.is_dir() or root.is_symlink():
        root.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o700)
    shutil.rmtree(root)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file, by sharing its blocks where the filesystem can; the copy is a file of its own."""
    with open_file(source, follow=False) as read:
        if not clone(read, target):
            copy(read, target)


def clone(source: BufferedReader, target: Path) -> bool:
    """Copy an open file by sharing its blocks, at no cost, where the filesystem can; else False and no target."""
    with _create_like(source, target) as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, source.fileno())
        except OSError as error:
            if error.errno not in _NO_CLONES:
                raise
        else:
            return True
    target.unlink()
    return False


def copy(source: BufferedReader, target: Path, advance: Callable[[float], None] | None = None) -> None:
    """Copy the bytes of an open file to a new file; `advance` is called with their number as they are written."""
    with _create_like(source, target) as write:
        while block := source.read(_BLOCK):
            write.write(block)
            if advance is not None:
                advance(len(block))


def is_private(stream: BufferedReader) -> bool:
    """Whether not everybody may read a file."""
    return not os.fstat(stream.fileno()).st_mode & stat.S_IROTH


def _create_like(source: BufferedReader, target: Path) -> BinaryIO:
    """A new file to write, which is its owner's alone if `source` is private."""
    mode = 0o600 if is_private(source) else 0o666
    return open(target, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file of an artifact (read-only) a second name; a copy where the filesystem has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_file(source, target)
