"""The folder of files and batches: a database, and the bytes of each file. Several processes may use it.

    <folder>/batches.db       what is known of each file and batch, and answers of batches that are not over (SQLite)
    <folder>/contents/<id>    the bytes of a file, written beside it, synced, and renamed

What is acknowledged is on the disk. A full disk changes nothing of what is there.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.gateway.errors import ApiError
from pipeline.sqlite_file import open_database

_log = logging.getLogger("pipeline.gateway")

_VERSION = 1
_TABLES = """
CREATE TABLE files (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    purpose TEXT NOT NULL,
    expires_at INTEGER,
    object TEXT NOT NULL                    -- JSON of FileObject
);
CREATE INDEX files_of ON files (tenant);
CREATE TABLE batches (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    status TEXT NOT NULL,
    completed INTEGER NOT NULL DEFAULT 0,   -- answers so far
    failed INTEGER NOT NULL DEFAULT 0,
    output_expires_s INTEGER,
    object TEXT NOT NULL                    -- JSON of BatchObject
);
CREATE INDEX batches_of ON batches (tenant);
CREATE TABLE answers (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,                  -- of the input file, from 0
    failed INTEGER NOT NULL,
    text TEXT NOT NULL,                     -- line of the output or error file, without its end
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageFull(ApiError):
    """The disk is full, or its quota is used up. What was kept before is still there."""

    def __init__(self) -> None:
        super().__init__(507, "The server's disk is full; nothing was changed", code="storage_full")


class StorageFolder:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: it is made when something is kept for the first time.
        """
        self.folder = folder
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    @property
    def in_use(self) -> bool:
        """Whether anything was ever kept here."""
        return (self.folder / "batches.db").exists()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    @contextmanager
    def new_content(self) -> Iterator[BinaryIO]:
        """Open a temporary file for the bytes of a file; it is removed after the block unless it was published."""
        with self.disk_errors():
            with self._lock:
                self._database()
            path = str(self.folder / "contents" / f".tmp-{secrets.token_hex(8)}")
            try:
                with open(path, "x+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    yield file
            finally:
                Path(path).unlink(missing_ok=True)

    def content_path(self, id: str) -> Path:
        """Return where the bytes of a file lie."""
        return self.folder / "contents" / id

    def publish(self, content: BinaryIO, id: str) -> None:
        """Give a temporary file its name, once its bytes are on the disk."""
        content.flush()
        os.fsync(content.fileno())
        os.rename(content.name, self.content_path(id))
        _sync_folder(self.content_path(id).parent)

    def read(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Return the rows of a query; none where nothing was ever kept."""
        if not self.in_use:
            return []
        with self.disk_errors(), self._lock:
            return self._database().execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction that is on the disk after the block, or undone if the block fails."""
        with self.disk_errors(), self._lock:
            database = self._database()
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                # A full disk has ended the transaction already.
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            (self.folder / "contents").mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / "batches.db"
            self._opened = open_database(path, "a database of batches", _TABLES, _VERSION, power_safe=True)
        return self._opened

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn what the disk refuses in the block into an `ApiError`: 507 if it is full, else 503."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            if full or (isinstance(error, OSError) and error.errno in _NO_SPACE):
                raise StorageFull from error
            _log.error("%s cannot be used: %s", self.folder, error)
            text = "Files and batches cannot be kept now; the server's log says why"
            raise ApiError(503, text, code="storage_failed") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
