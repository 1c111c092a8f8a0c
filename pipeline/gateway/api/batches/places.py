"""Places of files and batches: their tables in SQLite and PostgreSQL, and the bytes of files.

    <folder>/batches.db       files, batches, and answers of batches that are not over (SQLite)
    <folder>/contents/<id>    the bytes of a file, written beside it, synced, and renamed

Several processes of a machine may share a folder. What is acknowledged is on the disk; a full disk changes nothing of
what is there. Several gateways share a PostgreSQL server, where the bytes of a file are rows of 1 MiB.
"""

from __future__ import annotations

import io
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pipeline.cache.encryption import UnreadableEntry
from pipeline.gateway.database import (
    PostgresDatabase,
    SqliteDatabase,
    StateDatabase,
    StorageFailed,
    disk_errors,
    sqlite_tables,
)
from pipeline.gateway.errors import ApiError
from pipeline.sqlite_file import open_database

BATCH_TABLES = (files("pipeline.gateway") / "data" / "batches.sql").read_text(encoding="utf-8")
# Bytes of files, where there is no folder for them.
CONTENT_TABLES = (files("pipeline.gateway") / "data" / "contents.sql").read_text(encoding="utf-8")
_VERSION = 1


class BatchPlace(StateDatabase, Protocol):
    """A database with `BATCH_TABLES`, and the bytes of files."""

    def write(self, id: str, parts: Iterable[bytes]) -> int:
        """Write the bytes of a file, which are durable when this returns, and gone if it fails. Returns their number.

        Raises:
            ApiError: 503, or 507 if the disk is full.
        """

    def open(self, id: str) -> BinaryIO:
        """Open the bytes of a file for reading; it can be sought in from the start."""

    def remove(self, id: str) -> None:
        """Remove the bytes of a file, if they are there."""

    def remove_unknown(self, older_s: float) -> None:
        """Remove bytes of no file that were written so many seconds ago: a process died while it added a file."""


class BatchFolder(SqliteDatabase):
    """A folder of this machine; see `BatchPlace`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made when something is stored for the first time."""
        super().__init__(self._open_database, folder)
        self._folder = folder
        self._contents = folder / "contents"

    @property
    def in_use(self) -> bool:
        return (self._folder / "batches.db").exists()

    def read(self, query: str, *values: Any) -> list[Any]:
        return super().read(query, *values) if self.in_use else []

    def write(self, id: str, parts: Iterable[bytes]) -> int:
        with disk_errors(self._folder):
            self.make()
            draft, size = self._contents / f".tmp-{secrets.token_hex(8)}", 0
            try:
                with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    for part in parts:
                        size += file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
                draft.rename(self._contents / id)
            finally:
                draft.unlink(missing_ok=True)
            _sync_folder(self._contents)
        return size

    def open(self, id: str) -> BinaryIO:
        with disk_errors(self._folder):
            return (self._contents / id).open("rb")

    def remove(self, id: str) -> None:
        (self._contents / id).unlink(missing_ok=True)

    def remove_unknown(self, older_s: float) -> None:
        # Read before the folder is: bytes are there before their file is known.
        known = {row[0] for row in self.read("SELECT id FROM files")}
        for path in self._contents.iterdir():
            with suppress(FileNotFoundError):
                if path.name not in known and time.time() - path.stat().st_mtime > older_s:
                    path.unlink()

    def _open_database(self) -> sqlite3.Connection:
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        tables = sqlite_tables(BATCH_TABLES)
        database = open_database(
            self._folder / "batches.db", "a database of batches", tables, _VERSION, power_safe=True
        )
        database.executescript(tables)
        return database


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_PART_BYTES = 2**20


class PostgresBatches(PostgresDatabase):
    """A PostgreSQL server with `BATCH_TABLES` and `CONTENT_TABLES`; see `BatchPlace`."""

    def write(self, id: str, parts: Iterable[bytes]) -> int:
        size = 0
        try:
            for number, part in enumerate(_of_one_size(parts)):
                # Written twice, if the answer to the first time was lost.
                self.run(
                    "INSERT INTO contents (file, part, written, bytes) VALUES (%s, %s, clock(), %s)"
                    " ON CONFLICT DO NOTHING",
                    id,
                    number,
                    self.codec.seal(part, _key(id, number)),
                )
                size += len(part)
        except BaseException:
            with suppress(ApiError):
                self.remove(id)
            raise
        return size

    def open(self, id: str) -> BinaryIO:
        return io.BufferedReader(_Parts(self, id), _PART_BYTES)

    def remove(self, id: str) -> None:
        self.run("DELETE FROM contents WHERE file = %s", id)

    def remove_unknown(self, older_s: float) -> None:
        self.run(
            "DELETE FROM contents WHERE written < clock() - %s AND file NOT IN (SELECT id FROM files)",
            older_s,
        )


def _of_one_size(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut bytes anew, into parts of the size of a row."""
    buffer = bytearray()
    for part in parts:
        buffer += part
        while len(buffer) >= _PART_BYTES:
            yield bytes(buffer[:_PART_BYTES])
            del buffer[:_PART_BYTES]
    if buffer:
        yield bytes(buffer)


class _Parts(io.RawIOBase):
    """The bytes of a file, as a file."""

    def __init__(self, database: PostgresDatabase, id: str) -> None:
        self._database, self._id = database, id
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the size is not known here")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, start = divmod(self._at, _PART_BYTES)
        rows = self._database.read(
            "SELECT bytes FROM contents WHERE file = %s AND part = %s", self._id, number
        )
        if not rows:
            return 0
        try:
            part = self._database.codec.open(rows[0][0], _key(self._id, number))
        except UnreadableEntry as error:
            raise StorageFailed from error
        read = part[start : start + len(buffer)]
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)


def _key(file: str, number: int) -> bytes:
    """Bind a sealed part to its place in a file."""
    return f"content\0{file}\0{number}".encode()
