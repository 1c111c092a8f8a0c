"""Files and batches in a folder of this machine, which several processes may share.

    <folder>/batches.db       what is known of each file and batch, and answers of batches that are not over (SQLite)
    <folder>/contents/<id>    the bytes of a file, written beside it, synced, and renamed

What is acknowledged is on the disk. A full disk changes nothing of what is there.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.cache.encryption import Codec
from pipeline.gateway.batches.rows import BATCH_TABLES, LATER_TABLES
from pipeline.gateway.state.database import Execute, SqliteDatabase, Unsealed, disk_errors, sqlite_tables
from pipeline.sqlite_file import open_database

_VERSION = 1


class BatchFolder:
    """See `pipeline.gateway.batches.rows.BatchPlace`."""

    codec: Codec = Unsealed()

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: it is made when something is stored for the first time.
        """
        self._folder = folder
        self._contents = folder / "contents"
        self._database = SqliteDatabase(self._open_database, folder)

    @property
    def in_use(self) -> bool:
        return (self._folder / "batches.db").exists()

    def read(self, query: str, *values: Any) -> list[Any]:
        return self._database.read(query, *values) if self.in_use else []

    def transaction(self, lock: str) -> AbstractContextManager[Execute]:
        return self._database.transaction(lock)

    def close(self) -> None:
        self._database.close()

    def write(self, id: str, parts: Iterable[bytes]) -> int:
        with disk_errors(self._folder):
            self._database.open()
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
        database.executescript(LATER_TABLES)
        return database


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
