"""Files that only their owner may read: they hold questions, answers or keys.

A new file has mode 0600 from its first moment, whatever the umask. One that is there already and that others may read
is tightened where it is the pipeline's own (the database of a cache), and left as it is where a user named it (a log,
an output): who chose those permissions may have meant them, and a warning says what to do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)
_MODE = 0o600
_OTHERS = 0o077


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Keep from others whatever this process, and those that it starts, make within the block: umask 077."""
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def make_private(file: Path, *, own: bool) -> None:
    """Make an empty file with mode 0600, to be called before it is opened for writing. A file that is there stays.

    It is never opened here: SQLite loses its locks on a file of which this process closes any descriptor.

    Args:
        own: whether a file that others may read is tightened; if not, a warning is logged. What is no regular file
            (a pipe, a terminal) is left alone.

    Raises:
        OSError: the file cannot be made.
    """
    file = file.resolve()
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
    except FileExistsError:
        if own:
            tighten(file)
        else:
            warn_if_readable(file, "others may read it")


def tighten(file: Path) -> None:
    """Take the permissions of group and others from a file, if it is there; log a warning if that cannot be done."""
    try:
        mode = _readable_by_others(file, _OTHERS)
        if mode is not None:
            file.chmod(mode & ~_OTHERS)
            _log.warning(
                "%s could be read by others (mode %04o): it is now %04o", file, mode, mode & ~_OTHERS
            )
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("%s can be read by others, and its mode cannot be changed: %s", file, error.strerror)


def warn_if_readable(file: Path, consequence: str, *, by: int = _OTHERS) -> None:
    """Log a warning if a regular file has one of the permission bits `by`."""
    try:
        mode = _readable_by_others(file, by)
    except OSError:
        return
    if mode is not None:
        _log.warning("%s: %s (mode %04o): run chmod 600 %s", file, consequence, mode, file)


def _readable_by_others(file: Path, bits: int) -> int | None:
    """The mode of a regular file that has one of the bits; None for any other."""
    info = file.stat()
    mode = stat.S_IMODE(info.st_mode)
    return mode if stat.S_ISREG(info.st_mode) and mode & bits else None
