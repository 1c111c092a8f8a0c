"""Hashes of files, remembered, so that many gigabytes are read once and not at every build or start.

A remembered hash is believed while device, inode, size, change time and modification time are the same: nobody can set
the change time back, so every write shows. What shows in none of them is a disk that forgets; therefore a hash is
believed for 30 days, and `pipeline store verify` believes none. A file that was changed less than two seconds before
it was hashed is not remembered: a later write could fall into the same tick of a coarse clock. What cannot be read or
written here is only slower.
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

MAX_AGE_S = 30 * 24 * 3600.0
_SCHEMA = 2
_FIELDS = 7
_SETTLED_S = 2.0
_MAX_BYTES = 64 << 20


class FileHashes:
    """A JSON file: path -> [device, inode, bytes, ctime_ns, mtime_ns, sha256, when it was hashed (s)].

    With None for a file, nothing outlives the process.
    """

    def __init__(self, path: Path | None) -> None:
        """Remember hashes in a file. It is read when the first hash is asked for.

        Args:
            path: the JSON file, which need not exist; None: nothing outlives the process.
        """
        self._path = path
        self._known: dict[str, list[int | str]] | None = None
        self._new: dict[str, list[int | str]] = {}
        self._gone: set[str] = set()

    def sha256(
        self,
        stream: BufferedReader,
        path: Path,
        advance: Callable[[float], None] | None = None,
        *,
        again: bool = False,
    ) -> str:
        """SHA-256 of an open file, 64 hexadecimal digits.

        Args:
            path: name of the file now, or when it is asked for next.
            advance: called with the number of bytes that are read, or need not be.
            again: read it, whatever is remembered.
        """
        before, name = _state(stream), str(path)
        known = self._find(name)
        believed = (
            known is not None and known[:5] == before and 0 <= time.time() - float(known[6]) < MAX_AGE_S
        )
        if known is not None and believed and not again:
            if advance is not None:
                advance(os.fstat(stream.fileno()).st_size)
            return str(known[5])
        digest = files.sha256(stream, advance)
        info, now = os.fstat(stream.fileno()), time.time()
        if _state(stream) == before and now - max(info.st_ctime, info.st_mtime) > _SETTLED_S:
            self._new[name] = [*before, digest, int(now)]
        else:
            self._new.pop(name, None)
            self._gone.add(name)
        return digest

    def save(self) -> None:
        """Keep what was learned for the next process, beside what others have learned meanwhile."""
        if self._path is None or not (self._new or self._gone):
            return
        entries = {name: entry for name, entry in self._load().items() if name not in self._gone} | self._new
        entries = {name: entry for name, entry in entries.items() if os.path.exists(name)}
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"schema": _SCHEMA, "files": entries}), encoding="utf-8")
            draft.replace(self._path)
        self._known, self._new, self._gone = entries, {}, set()

    def _find(self, name: str) -> list[int | str] | None:
        if self._known is None:
            self._known = self._load()
        return self._new.get(name) or self._known.get(name)

    def _load(self) -> dict[str, list[int | str]]:
        if self._path is None:
            return {}
        try:
            raw = read_json(self._path, most=_MAX_BYTES)
            if raw["schema"] != _SCHEMA:
                return {}
            return {path: entry for path, entry in raw["files"].items() if len(entry) == _FIELDS}
        except (UnreadableFile, KeyError, TypeError, AttributeError):
            return {}


def _state(stream: BufferedReader) -> list[int | str]:
    info = os.fstat(stream.fileno())
    return [info.st_dev, info.st_ino, info.st_size, info.st_ctime_ns, info.st_mtime_ns]
