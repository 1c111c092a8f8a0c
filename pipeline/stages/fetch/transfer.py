"""One file from the Hub onto the disk, going on where an earlier try or an earlier process stopped.

<partial>   grows; what a killed process left of it is kept, and only the rest is asked for (HTTP Range)
<target>    appears by a rename, with the right size and the right hash, or not at all
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from pipeline.errors import SourceError
from pipeline.stages.fetch.failures import BrokenTransfer, RetryPolicy, Stopped
from pipeline.stages.fetch.hub import Hub, RemoteFile

_BLOCK = 1 << 20
_PROGRESS_BYTES = 1 << 16  # a try that brings this much was worth it, and the next ones are counted anew


@dataclass
class Transfer:
    """The way of one file."""

    hub: Hub
    repo: str
    commit: str
    file: RemoteFile
    partial: Path
    target: Path
    say: Callable[[str], None]
    stopped: threading.Event
    advance: Callable[[float], None]  # told bytes as they arrive, negative if they are lost
    _digest: Any = field(init=False)  # of the bytes in the partial file; hashlib's type has no name

    def run(self) -> None:
        """Bring the file to `target`. SourceError if it cannot be had, or is not what the Hub lists."""
        if self.target.exists():
            return
        with self.partial.open("ab+") as out:
            resumed = self._take_up(out)
            self._fill(out)
            if self._digest.hexdigest() != self.file.hash and resumed:  # the part from before may be damaged
                self._lose(out)
                self._fill(out)
            if self._digest.hexdigest() != self.file.hash:
                self._lose(out)
                raise SourceError(
                    f"hf:{self.repo}: {self.file.name} arrives with the hash {self._digest.hexdigest()}, but the Hub "
                    f"lists {self.file.hash}; a proxy or mirror alters it, or the repository is damaged"
                )
            out.flush()
            os.fsync(out.fileno())
        self.partial.rename(self.target)

    def _take_up(self, out: BinaryIO) -> bool:
        """Hash what an earlier process left; whether there was anything."""
        self._digest = self._new_digest()
        if out.tell() > self.file.bytes:
            out.truncate(0)
        out.seek(0)
        while block := out.read(_BLOCK):
            self._digest.update(block)
        return out.tell() > 0

    def _fill(self, out: BinaryIO) -> None:
        retries = RetryPolicy(self.hub.subject(self.repo, self.commit), self.say, self.stopped)
        while (before := out.tell()) < self.file.bytes:
            try:
                self._receive(out)
            except (httpx.HTTPError, BrokenTransfer) as error:
                retries.after(error, progressed=out.tell() - before >= _PROGRESS_BYTES)

    def _receive(self, out: BinaryIO) -> None:
        """One request for all that is lacking; it may break at any place."""
        start = out.tell()
        with self.hub.open(self.repo, self.commit, self.file.name, start) as response:
            if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                self._lose(out)  # the server does not resume: it sends the file from its beginning
                if response.status_code == 206:
                    raise BrokenTransfer(f"{self.file.name}: another part than was asked for")
            for block in response.iter_raw():  # as they come: nothing waits in a buffer when it breaks
                if self.stopped.is_set():
                    raise Stopped
                out.write(block)
                self._digest.update(block)
                self.advance(len(block))
                if out.tell() > self.file.bytes:
                    raise SourceError(
                        f"hf:{self.repo}: {self.file.name} is longer than the {self.file.bytes} bytes of the Hub's list"
                    )
        if out.tell() < self.file.bytes:
            raise BrokenTransfer(f"{self.file.name} ended after {out.tell()} of {self.file.bytes} bytes")

    def _lose(self, out: BinaryIO) -> None:
        self.advance(-out.tell())
        out.truncate(0)
        out.seek(0)
        self._digest = self._new_digest()

    def _new_digest(self) -> Any:
        if self.file.is_sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.file.bytes, usedforsecurity=False)
