"""Files of an object store, fetched in parts: several at once, resumed where they broke off, hashed while they come.

    .weights.bin.draft     what has come, each part at its place
    .weights.bin.parts     numbers of the parts that are complete, one a line

Bytes are written as they arrive, so that memory does not grow with files. SHA-256 follows the first part that is not
there yet, while what it reads is still in the page cache. A fetch that was killed reads again what it had, and fetches
the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import StoreError
from pipeline.store.manifest import FileEntry

PART = 64 << 20
STREAMS = 8
_BLOCK = 1 << 20
# Of one part, without a byte between them; each waits twice as long as the attempt before.
_ATTEMPTS = 6
_PAUSE_S = 0.2


class RangesUnsupported(Exception):
    """The server gives whole files only."""


class BrokenOff(Exception):
    """A transfer ended before its end; asking again may help."""


class Source(Protocol):
    """Where files come from."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def stream(self, path: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Bytes of a file, from `start` until `end`, as they come.

        Raises:
            RangesUnsupported: only the whole file can be had.
            BrokenOff: the transfer failed.
        """


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file that is to be fetched.

    Attributes:
        path: address of the file at its source.
        target: where it goes; it has this name once it is whole and verified.
        entry: size and SHA-256.
    """

    path: str
    target: Path
    entry: FileEntry


def fetch_files(source: Source, wanted: Sequence[WantedFile], advance: Callable[[float], None]) -> list[str]:
    """Fetch files that are not there yet.

    Args:
        source: where they come from.
        wanted: the files.

    Returns:
        What is wrong with files of which the source has other bytes than those that are wanted.

    Raises:
        BrokenOff: a part did not come, however often it was asked for.
        OSError: a file cannot be written.
    """
    files = [_File(source, entry, advance) for entry in wanted]
    # The largest first, so that none of them is left alone at the end.
    files.sort(key=lambda download: -download.wanted.entry.bytes)
    faults: list[str] = []
    with ThreadPoolExecutor(STREAMS) as pool:
        try:
            opened = [file for file in pool.map(_File.open, files) if file is not None]
            tasks = [pool.submit(file.fetch, part) for file in opened for part in file.missing]
            for task in as_completed(tasks):
                task.result()
            faults += filter(None, pool.map(_File.finish, files))
        except BaseException:
            # What is under way ends with its part; what was not begun is left.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            for file in files:
                file.close()
    return faults


def pause(failures: int) -> None:
    """Wait before another attempt. Re-raises the exception that is handled after too many."""
    if failures >= _ATTEMPTS:
        raise
    time.sleep(_PAUSE_S * 2 ** (failures - 1))


class _File:
    """One file that is being fetched. Its methods may be called from several threads."""

    def __init__(self, source: Source, wanted: WantedFile, advance: Callable[[float], None]) -> None:
        self.wanted, self._source, self._advance = wanted, source, advance
        target = wanted.target
        self._draft = target.with_name(f".{target.name}.draft")
        self._journal = target.with_name(f".{target.name}.parts")
        self._descriptor: int | None = None
        self._fault, self._ranged = "", True
        self._done: set[int] = set()
        self._lock, self._hashing = threading.Lock(), threading.Lock()
        self._digest, self._hashed = hashlib.sha256(), 0

    @property
    def parts(self) -> int:
        return max(1, -(-self.wanted.entry.bytes // PART))

    @property
    def missing(self) -> list[int]:
        """Numbers of parts that are not there."""
        return [part for part in range(self.parts) if part not in self._done]

    def open(self) -> _File | None:
        """Look for what is there. None if nothing is to be fetched: it is whole, or the source has something else."""
        target, size = self.wanted.target, self.wanted.entry.bytes
        if target.is_file() and target.stat().st_size == size:
            # It got its name when it had been verified.
            self._advance(size)
            return None
        current = self._source.size(self.wanted.path)
        if current != size:
            self._fault = f"{self.wanted.path}: is missing"
            if current is not None:
                self._fault = f"{self.wanted.path}: has {current} bytes, and should have {size}"
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._descriptor).st_size == size and self._journal.is_file():
            lines = self._journal.read_text(encoding="ascii", errors="replace").splitlines()
            self._done = {int(line) for line in lines if line.isdecimal() and int(line) < self.parts}
        else:
            self._journal.unlink(missing_ok=True)
            os.ftruncate(self._descriptor, size)
        for part in sorted(self._done):
            self._advance(self._end(part) - part * PART)
        self._follow()
        return self

    def fetch(self, part: int) -> None:
        """Fetch a part, and go on where it breaks off."""
        at, end, failures = part * PART, self._end(part), 0
        while at < end:
            try:
                if not self._ranged:
                    return self._fetch_whole()
                for chunk in self._chunks(at, end):
                    self._write(chunk, at)
                    at, failures = at + len(chunk), 0
            except RangesUnsupported:
                self._ranged = False
            except BrokenOff:
                failures += 1
                pause(failures)
        self._complete(part)
        return None

    def finish(self) -> str:
        """Give the file its name if it is the file that is wanted. Returns what is wrong with it."""
        if self._descriptor is None:
            return self._fault
        self._follow()
        self.close()
        wanted = self.wanted
        self._journal.unlink(missing_ok=True)
        if self._digest.hexdigest() != wanted.entry.sha256:
            self._draft.unlink()
            return f"{wanted.path}: has not the {wanted.entry.bytes} bytes with the SHA-256 {wanted.entry.sha256}"
        self._draft.rename(wanted.target)
        return ""

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)

    def _fetch_whole(self) -> None:
        """Fetch a file from its beginning, where the source gives no ranges; once, whichever part finds that out."""
        with self._lock:
            if not self.missing:
                return
            at = 0
            for chunk in self._chunks(0, self.wanted.entry.bytes):
                self._write(chunk, at)
                at += len(chunk)
            self._done = set(range(self.parts))

    def _chunks(self, start: int, end: int) -> Iterator[bytes]:
        """Stream a range; what comes is neither more nor less."""
        at, path, whole = start, self.wanted.path, end - start == self.wanted.entry.bytes
        for chunk in self._source.stream(path) if whole else self._source.stream(path, start, end):
            at += len(chunk)
            if at > end:
                raise BrokenOff(f"{path}: more bytes came than were asked for")
            yield chunk
        if at < end:
            raise BrokenOff(f"{path}: ended after {at - start} of {end - start} bytes")

    def _write(self, chunk: bytes, at: int) -> None:
        assert self._descriptor is not None
        view = memoryview(chunk)
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written
        self._advance(len(chunk))

    def _complete(self, part: int) -> None:
        with self._lock:
            self._done.add(part)
            with self._journal.open("a", encoding="ascii") as journal:
                journal.write(f"{part}\n")
        self._follow(wait=False)

    def _follow(self, *, wait: bool = True) -> None:
        """Hash all parts up to the first that is missing; without `wait`, not beside another thread that does."""
        assert self._descriptor is not None
        if not self._hashing.acquire(blocking=wait):
            return
        try:
            while self._hashed < self.parts and self._hashed in self._done:
                at, end = self._hashed * PART, self._end(self._hashed)
                while at < end:
                    block = os.pread(self._descriptor, min(_BLOCK, end - at), at)
                    if not block:
                        raise StoreError(f"{self._draft}: became shorter while it was fetched")
                    self._digest.update(block)
                    at += len(block)
                self._hashed += 1
        finally:
            self._hashing.release()

    def _end(self, part: int) -> int:
        return min((part + 1) * PART, self.wanted.entry.bytes)
