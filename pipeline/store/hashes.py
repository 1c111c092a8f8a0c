"""Hashes of files, remembered, so that many gigabytes are read once and not at every build or start.

A remembered hash is believed while device, inode, size, change time and modification time are the same; nobody can
set the change time back. A file that was changed less than two seconds before it was hashed is not remembered: a later
write could fall into the same tick of a coarse clock. What cannot be read or written here is only slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

from pipeline.reading import UnreadableFile, read_json
from pipeline.store import files

_SCHEMA = 1
_SETTLED_S = 2.0
_MAX_BYTES = 64 << 20


class FileHashes:
    """A JSON file: path -> [device, inode, bytes, ctime_ns, mtime_ns, sha256]."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[int | str]] = self._load()

    def sha256(self, stream: BufferedReader, path: Path, advance: Callable[[float], None]) -> str:
        """SHA-256 of an open file, 64 hexadecimal digits; `path` is its name."""
        before = _state(stream)
        known = self._known.get(str(path))
        if known is not None and known[:-1] == before:
            advance(os.fstat(stream.fileno()).st_size)
            return str(known[-1])
        digest = files.sha256(stream, advance)
        info = os.fstat(stream.fileno())
        if _state(stream) == before and time.time() - max(info.st_ctime, info.st_mtime) > _SETTLED_S:
            self._known[str(path)] = [*before, digest]
        else:
            self._known.pop(str(path), None)
        return digest

    def save(self) -> None:
        """Keep what is known for the next process. Of two at once, the last one's stays."""
        if self._path is None:
            return
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"schema": _SCHEMA, "files": self._known}), encoding="utf-8")
            draft.replace(self._path)

    def _load(self) -> dict[str, list[int | str]]:
        if self._path is None:
            return {}
        try:
            raw = read_json(self._path, most=_MAX_BYTES)
            if raw["schema"] != _SCHEMA:
                return {}
            return {path: entry for path, entry in raw["files"].items() if len(entry) == 6}
        except (UnreadableFile, KeyError, TypeError, AttributeError):
            return {}


def _state(stream: BufferedReader) -> list[int | str]:
    found = os.fstat(stream.fileno())
    return [found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns]
