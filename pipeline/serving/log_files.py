"""Logs of the processes of a supervisor: private files in a folder for each recipe, kept from earlier starts.

<store>/logs/<recipe>/triton.log      output of Triton since it was started last
                      triton.log.1    before its last restart, or until it was too large; up to .5
                      gateway.log
                      serve.log       output of a detached supervisor
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pipeline.private_files import make_private

_log = logging.getLogger(__name__)
KEPT = 5
_FOLLOW_S = 0.2
_MODE = 0o700


def log_folder(logs: Path, name: str) -> Path:
    """Make the folder of a recipe's logs, which only its owner may read."""
    folder = logs / name
    folder.mkdir(parents=True, exist_ok=True, mode=_MODE)
    folder.chmod(_MODE)
    return folder


def rotate(file: Path) -> None:
    """Make way for a new log: `triton.log` becomes `triton.log.1`, and so on; the oldest goes.

    Files that are not regular, such as a pipe or a terminal, stay, and so do those that cannot be moved.
    """
    with contextlib.suppress(OSError):
        if file.is_file() and file.stat().st_size:
            _make_way(file)
            file.replace(_older(file, 1))


def open_log(file: Path, *, own: bool = True, anew: bool = False) -> BinaryIO:
    """Open the log of a process that is to be started, for appending: it may be emptied while it is written.

    Where the file cannot be opened, because the disk is full or its folder is gone, the process writes to /dev/null,
    rather than not be started.

    Args:
        own: See `private_files.make_private`.
        anew: Whether to empty it first.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        make_private(file, own=own)
        how = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if anew else 0)
        return os.fdopen(os.open(file, how), "ab")
    except OSError as error:
        _log.warning("%s cannot be written (%s): what goes there is lost", file, error.strerror)
        return open(os.devnull, "ab")


class LogLimit:
    """Keeps a log that is being written from filling the disk: its content moves to `.1` when it is too large.

    Its writer must have opened it for appending. Lines that come while it is moved may be lost.
    """

    def __init__(self, file: Path, most: int = 256 << 20, interval_s: float = 10.0) -> None:
        """`check` looks at the log, at most once in `interval_s`; `most` is its largest size in bytes."""
        self._file, self._most, self._interval_s = file, most, interval_s
        self._next = time.monotonic() + interval_s

    def check(self) -> None:
        """Move the content of the log if there is too much. On a disk that is full, it is dropped."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval_s
        with contextlib.suppress(OSError):
            if not self._file.is_file() or self._file.stat().st_size <= self._most:
                return
            moved = _older(self._file, 1)
            try:
                _make_way(self._file)
                make_private(moved, own=True)
                shutil.copyfile(self._file, moved)
            except OSError:
                moved.unlink(missing_ok=True)
            os.truncate(self._file, 0)


def _make_way(file: Path) -> None:
    for number in range(KEPT - 1, 0, -1):
        if (older := _older(file, number)).exists():
            older.replace(_older(file, number + 1))


def _older(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}")


class LogTail:
    """Reads the ends of some logs, and then the lines that are added to them, over rotations."""

    def __init__(self, files: Mapping[str, Path], lines: int) -> None:
        """`files`: name of a log -> its file, which may not exist yet. `lines` of the end of each are read first."""
        self._logs = {name: _OpenLog(file, lines) for name, file in files.items()}

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield (name of the log, line) for all lines since the last call; a line that has no end yet waits for it."""
        for name, log in self._logs.items():
            for line in log.read():
                yield name, line

    def wait(self) -> None:
        """Wait a moment for more."""
        time.sleep(_FOLLOW_S)

    def close(self) -> list[tuple[str, str]]:
        """Close the files. Returns the lines since the last call of `read`, also a last one without an end."""
        return [(name, line) for name, log in self._logs.items() for line in log.close()]


class _OpenLog:
    """One log. Its file stays open, so that lines from before a rotation are read after it."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._begin: int | None = lines
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> list[str]:
        lines = self._more()
        if self._file is not None and not self._is_current():
            self._file.close()
            self._file = None
        if self._file is None and self._path.is_file():
            self._file = self._path.open("rb")
            new = self._more()
            # The beginning is left out only of a log that was there from the start.
            lines += new[-self._begin or len(new) :] if self._begin is not None else new
        self._begin = None
        return lines

    def close(self) -> list[str]:
        lines = self._more()
        if self._file is not None:
            self._file.close()
            self._file = None
        return [*lines, *([self._rest.decode("utf-8", "replace")] if self._rest else [])]

    def _more(self) -> list[str]:
        if self._file is None:
            return []
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def _is_current(self) -> bool:
        assert self._file is not None, "the caller looked"
        try:
            named = self._path.stat()
        except FileNotFoundError:
            # The new file is not there yet.
            return True
        opened = os.fstat(self._file.fileno())
        return os.path.samestat(named, opened) and named.st_size >= self._file.tell()
