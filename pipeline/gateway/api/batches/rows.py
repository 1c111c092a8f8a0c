"""Rows of files and batches: their tables in SQLite and PostgreSQL, the place that has them, and objects from rows."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from pipeline.cache.encryption import UnreadableEntry
from pipeline.gateway.api.batches.objects import FINAL, BatchObject, FileObject, RequestCounts
from pipeline.gateway.database import Execute, StateDatabase, marks
from pipeline.gateway.errors import ApiError

# Tables that older folders lack.
LATER_TABLES = """
CREATE TABLE IF NOT EXISTS claims (         -- the gateway that runs a batch
    batch text PRIMARY KEY,
    run bigint NOT NULL,                    -- number of the claim, without which nothing of the batch is changed
    until double precision NOT NULL
);
CREATE TABLE IF NOT EXISTS losses (
    batch text NOT NULL,
    line bigint NOT NULL,
    times bigint NOT NULL,                  -- that a server was lost while it worked on the line
    PRIMARY KEY (batch, line)
);
"""
BATCH_TABLES = f"""
CREATE TABLE files (
    n {{serial}},
    id text NOT NULL UNIQUE,
    tenant text NOT NULL,
    bytes bigint NOT NULL,
    purpose text NOT NULL,
    expires_at bigint,
    object {{blob}} NOT NULL                -- JSON of FileObject
);
CREATE INDEX files_of ON files (tenant, n);
CREATE TABLE batches (
    n {{serial}},
    id text NOT NULL UNIQUE,
    tenant text NOT NULL,
    status text NOT NULL,
    completed bigint NOT NULL DEFAULT 0,    -- answers so far
    failed bigint NOT NULL DEFAULT 0,
    output_expires_s bigint,
    object {{blob}} NOT NULL                -- JSON of BatchObject
);
CREATE INDEX batches_of ON batches (tenant, n);
CREATE TABLE answers (
    batch text NOT NULL,
    line bigint NOT NULL,                   -- of the input file, from 0
    failed bigint NOT NULL,
    text {{blob}} NOT NULL,                 -- line of the output or error file, without its end
    PRIMARY KEY (batch, line)
);{LATER_TABLES}"""
# Bytes of files, where there is no folder for them.
CONTENT_TABLES = """
CREATE TABLE contents (
    file text NOT NULL,
    part bigint NOT NULL,                   -- from 0; all but the last have the same size
    written double precision NOT NULL,
    bytes {blob} NOT NULL,
    PRIMARY KEY (file, part)
);
"""

SELECT_BATCHES = "SELECT id, tenant, object, completed, failed FROM batches"
UNFINISHED = f"(status NOT IN ({', '.join(map(repr, FINAL))}))"


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


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch and its tenant."""

    tenant: str
    batch: BatchObject


def new_file_id() -> str:
    """Return the id of a new file."""
    return f"file-{secrets.token_hex(12)}"


class BatchRows:
    """Rows of files and batches in a place. Those that were sealed with another key are left out."""

    def __init__(self, place: BatchPlace) -> None:
        self._place = place

    def _sealed(self, content: FileObject | BatchObject) -> bytes:
        return self._place.codec.seal(content.model_dump_json().encode(), _object_key(content.id))

    def _insert_file(self, execute: Execute, tenant: str, file: FileObject) -> None:
        row = (file.id, tenant, file.bytes, file.purpose, file.expires_at, self._sealed(file))
        columns = "id, tenant, bytes, purpose, expires_at, object"
        execute(f"INSERT INTO files ({columns}) VALUES {marks(row)}", *row)

    def _update_batch(self, execute: Execute, batch: BatchObject) -> None:
        changed = "UPDATE batches SET status = %s, object = %s WHERE id = %s"
        execute(changed, batch.status, self._sealed(batch), batch.id)

    def _files(self, rows: Iterable[Sequence[Any]]) -> list[FileObject]:
        """Files of rows of id and object."""
        files = []
        for id, kept in rows:
            with suppress(UnreadableEntry):
                files.append(FileObject.model_validate_json(self._place.codec.open(kept, _object_key(id))))
        return files

    def _batches(self, rows: Iterable[Sequence[Any]]) -> list[OwnedBatch]:
        """Batches of rows of `SELECT_BATCHES`, with the counts of now."""
        batches = []
        for id, tenant, kept, completed, failed in rows:
            with suppress(UnreadableEntry):
                batch = BatchObject.model_validate_json(self._place.codec.open(kept, _object_key(id)))
                counts = RequestCounts(total=batch.request_counts.total, completed=completed, failed=failed)
                batches.append(OwnedBatch(tenant, batch.model_copy(update={"request_counts": counts})))
        return batches

    def _remove_contents(self, files: Iterable[str]) -> None:
        """Remove the bytes of files that were not added; what cannot be removed now is swept later."""
        with suppress(ApiError):
            for id in files:
                self._place.remove(id)


def _object_key(id: str) -> bytes:
    """Bind a sealed object to its row."""
    return f"object\0{id}".encode()
