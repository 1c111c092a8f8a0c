"""Files, batches and the answers to their requests, in one folder that several gateways may share.

    <folder>/locks/<id>       held by the process that runs a batch; the kernel gives it back when the process dies

What else lies there is in `folder`. An answer is kept once for each line of a batch, so that nothing is written twice
however often a batch is begun. All methods block: call them in threads.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.gateway.batches.folder import StorageFolder
from pipeline.gateway.batches.objects import (
    FINAL,
    BatchFaults,
    BatchObject,
    BatchStatus,
    FileObject,
    RequestCounts,
)
from pipeline.gateway.errors import ApiError

_ABANDONED_S = 24 * 3600.0  # age of a file without a row that no process writes any more
_KEPT_S = 30 * 24 * 3600  # input files, and batches that are over


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """How much may be kept.

    Attributes:
        file_bytes: of one file that is uploaded.
        tenant_bytes: of all files of one tenant. What its batches end in is kept even beyond that, and counts.
        tenant_files: files of one tenant, those that its batches end in included.
        unfinished: batches of one tenant that are not over.
        finished: batches of one tenant that are over; of more, the oldest are forgotten.
    """

    file_bytes: int = 200 * 2**20
    tenant_bytes: int = 4 * 2**30
    tenant_files: int = 100_000
    unfinished: int = 100
    finished: int = 10_000


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch, and whose it is."""

    tenant: str
    batch: BatchObject


class BatchStorage(StorageFolder):
    """See the module."""

    def __init__(self, folder: Path, limits: StorageLimits = StorageLimits()) -> None:
        """
        Args:
            folder: where everything lies; it is made when the first file is uploaded.
            limits: of what is kept.
        """
        super().__init__(folder)
        self.limits = limits

    # Files

    def add_file(
        self, tenant: str, content: BinaryIO, filename: str, expires_s: int | None = None
    ) -> FileObject:
        """Keep a file that was uploaded for a batch.

        Args:
            tenant: whose it is.
            content: of `new_content`.
            filename: as the client names it.
            expires_s: seconds for which it is kept; None: 30 days.

        Raises:
            ApiError: 413, if the tenant has too many files or bytes; 507, if the disk is full.
        """
        size = content.seek(0, os.SEEK_END)
        now = int(time.time())
        made = FileObject(
            id=f"file-{secrets.token_hex(12)}", bytes=size, created_at=now,
            expires_at=now + (expires_s or _KEPT_S), filename=filename, purpose="batch",
        )  # fmt: skip
        with self.disk_errors():
            self.publish(content, made.id)
            try:
                with self.transaction() as database:
                    self._check_room(database, tenant, size)
                    _insert_file(database, tenant, made)
            except BaseException:
                self.content_path(made.id).unlink(missing_ok=True)
                raise
        return made

    def file(self, tenant: str, id: str) -> FileObject:
        """Return a file.

        Raises:
            ApiError: 404, if the tenant has none of this id.
        """
        rows = self.read("SELECT object FROM files WHERE id = ? AND tenant = ?", (id, tenant))
        if not rows:
            raise ApiError(404, f"No such File object: {id}", param="id", code="file_not_found")
        return FileObject.model_validate_json(rows[0][0])

    def content(self, tenant: str, id: str) -> Path:
        """Return the path of a file's bytes. Raises what `file` does."""
        return self.content_path(self.file(tenant, id).id)

    def files(
        self, tenant: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> Sequence[FileObject]:
        """List files of a tenant: at most `limit` from that which follows `after`."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        rows = self.read(
            "SELECT object FROM files WHERE tenant = :tenant AND (:purpose IS NULL OR purpose = :purpose)"
            f" AND (:after IS NULL OR n {sign} (SELECT n FROM files WHERE id = :after))"
            f" ORDER BY n {order} LIMIT :limit",
            {"tenant": tenant, "purpose": purpose, "after": after, "limit": limit},
        )
        return [FileObject.model_validate_json(row[0]) for row in rows]

    def delete_file(self, tenant: str, id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404, if the tenant has none of this id; 409, if a batch that is not over reads it.
        """
        self.file(tenant, id)
        with self.transaction() as database:
            using = [row[0] for row in database.execute("SELECT id FROM batches WHERE " + _READS, (id,))]
            if using:
                text = f"The file {id} is read by {using[0]}, which is not over: cancel it first"
                raise ApiError(409, text, code="file_in_use")
            database.execute("DELETE FROM files WHERE id = ?", (id,))
        self.content_path(id).unlink(missing_ok=True)

    # Batches

    def add_batch(self, tenant: str, batch: BatchObject, output_expires_s: int | None) -> BatchObject:
        """Keep a new batch.

        Args:
            tenant: whose it is.
            batch: the batch.
            output_expires_s: seconds for which the files that it ends in are kept; None: until they are deleted.

        Raises:
            ApiError: 404, if its input file does not exist; 413, if the tenant's files leave no room for those that
                it will end in; 429, if too many batches of the tenant are not over.
        """
        self.file(tenant, batch.input_file_id)
        with self.transaction() as database:
            self._check_room(database, tenant, 1)
            count = database.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND {_UNFINISHED}", (tenant,)
            ).fetchone()[0]
            if count >= self.limits.unfinished:
                text = f"{count} batches of yours are not over; wait for one, or cancel it"
                raise ApiError(429, text, code="batch_limit", retry_after_s=60)
            database.execute(
                "INSERT INTO batches (id, tenant, status, output_expires_s, object) VALUES (?, ?, ?, ?, ?)",
                (batch.id, tenant, batch.status, output_expires_s, batch.model_dump_json()),
            )
            database.execute(
                f"DELETE FROM batches WHERE n IN (SELECT n FROM batches WHERE tenant = ? AND NOT {_UNFINISHED}"
                " ORDER BY n DESC LIMIT -1 OFFSET ?)",
                (tenant, self.limits.finished),
            )
        return batch

    def batch(self, tenant: str, id: str) -> BatchObject:
        """Return a batch with the counts of now.

        Raises:
            ApiError: 404, if the tenant has none of this id.
        """
        found = self._batches("id = ? AND tenant = ?", (id, tenant))
        if not found:
            raise ApiError(404, f"No batch found with id '{id}'", param="id", code="batch_not_found")
        return found[0].batch

    def batches(self, tenant: str, *, after: str | None, limit: int) -> Sequence[BatchObject]:
        """List batches of a tenant, the newest first: at most `limit` from that which follows `after`."""
        before = "(:after IS NULL OR n < (SELECT n FROM batches WHERE id = :after))"
        values = {"tenant": tenant, "after": after, "limit": limit}
        found = self._batches(f"tenant = :tenant AND {before} ORDER BY n DESC LIMIT :limit", values)
        return [one.batch for one in found]

    def unfinished(self) -> Sequence[OwnedBatch]:
        """Return the batches of all tenants that are not over, the oldest first."""
        return self._batches(f"{_UNFINISHED} ORDER BY n", ())

    def change(self, id: str, change: Callable[[BatchObject], BatchObject]) -> BatchObject:
        """Replace a batch by what `change` makes of it, in one transaction. What it raises is raised here."""
        with self.transaction() as database:
            batch = self._batches("id = ?", (id,), database)[0].batch
            changed = change(batch)
            _update_batch(database, changed)
        return changed

    @contextmanager
    def claim(self, id: str) -> Iterator[bool]:
        """Hold a batch, so that no other gateway runs it; the kernel lets go of it when this process ends.

        Yields:
            Whether it is held; if not, another process has it.
        """
        path = self.folder / "locks" / id
        with self.disk_errors():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)

    def add_answers(self, id: str, answers: Iterable[tuple[int, bool, str]]) -> None:
        """Keep answers to requests of a batch, in one transaction. A line that has one keeps it.

        Args:
            id: of the batch.
            answers: line of the input file, whether the request failed, line of the output or error file.
        """
        with self.transaction() as database:
            added = [0, 0]
            for line, failed, text in answers:
                row = (id, line, failed, text)
                done = database.execute(
                    "INSERT OR IGNORE INTO answers (batch, line, failed, text) VALUES (?, ?, ?, ?)", row
                )
                added[failed] += done.rowcount
            counted = "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE id = ?"
            database.execute(counted, (*added, id))

    def answered(self, id: str) -> set[int]:
        """Return the lines of a batch that have an answer."""
        return {row[0] for row in self.read("SELECT line FROM answers WHERE batch = ?", (id,))}

    def finish(self, id: str, status: BatchStatus, errors: BatchFaults | None = None) -> BatchObject:
        """Write the answers of a batch into its output and error files, and end it.

        It may be called again after a failure or a death in its middle: the files have the same ids then.

        Args:
            id: of the batch.
            status: in which it ends.
            errors: why it failed.
        """
        tenant, expires_s = self.read("SELECT tenant, output_expires_s FROM batches WHERE id = ?", (id,))[0]
        now = int(time.time())
        files = {}
        for failed, kind in ((False, "output"), (True, "error")):
            with self.new_content() as content:
                for line in self._answers(id, failed):
                    content.write(line.encode() + b"\n")
                if not (size := content.tell()):
                    continue
                files[f"{kind}_file_id"] = FileObject(
                    id=f"file-{id.removeprefix('batch_')}-{kind}", bytes=size, created_at=now,
                    expires_at=None if expires_s is None else now + expires_s,
                    filename=f"{id}_{kind}.jsonl", purpose="batch_output",
                )  # fmt: skip
                self.publish(content, files[f"{kind}_file_id"].id)
        with self.transaction() as database:
            for file in files.values():
                _insert_file(database, tenant, file)
            batch = self._batches("id = ?", (id,), database)[0].batch
            ended = batch.entered(status, now, errors=errors, **{key: file.id for key, file in files.items()})
            _update_batch(database, ended)
            database.execute("DELETE FROM answers WHERE batch = ?", (id,))
        (self.folder / "locks" / id).unlink(missing_ok=True)
        return ended

    def sweep(self) -> None:
        """Remove files that have expired, batches that are long over, and what processes that died left behind."""
        now = time.time()
        with self.transaction() as database:
            expired = [
                row[0]
                for row in database.execute(
                    "SELECT id FROM files WHERE expires_at <= ?", (int(now),)
                ).fetchall()
                if not database.execute("SELECT 1 FROM batches WHERE " + _READS, (row[0],)).fetchone()
            ]
            database.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in expired])
            ended = f"NOT ({_UNFINISHED}) AND json_extract(object, '$.created_at') <= ?"
            database.execute(f"DELETE FROM batches WHERE {ended}", (int(now) - _KEPT_S,))
        for id in expired:
            self.content_path(id).unlink(missing_ok=True)
        # Read before the folder is: a file is published before it is known.
        known = {row[0] for row in self.read("SELECT id FROM files")}
        for path in (self.folder / "contents").iterdir():
            with suppress(FileNotFoundError):
                if path.name not in known and now - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _check_room(self, database: sqlite3.Connection, tenant: str, size: int) -> None:
        """Refuse a file of `size` bytes if a tenant has too many files or bytes already."""
        files, kept = database.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", (tenant,)
        ).fetchone()
        limits = self.limits
        if kept + size > limits.tenant_bytes:
            text = (
                f"Your files have {kept} bytes; with this one they would have more than "
                f"{limits.tenant_bytes}: delete some"
            )
            raise ApiError(413, text, code="storage_limit")
        if files >= limits.tenant_files:
            raise ApiError(413, f"You have {files} files: delete some", code="storage_limit")

    def _answers(self, id: str, failed: bool) -> Iterator[str]:
        """Lines in the order of the input file, read in parts: all of them may be large."""
        line = -1
        while rows := self.read(
            "SELECT line, text FROM answers WHERE batch = ? AND failed = ? AND line > ? ORDER BY line LIMIT 256",
            (id, failed, line),
        ):
            yield from (text for _, text in rows)
            line = rows[-1][0]

    def _batches(
        self,
        where: str,
        values: Sequence[Any] | Mapping[str, Any],
        database: sqlite3.Connection | None = None,
    ) -> list[OwnedBatch]:
        query = f"SELECT tenant, object, completed, failed FROM batches WHERE {where}"
        rows = self.read(query, values) if database is None else database.execute(query, values)
        return [
            OwnedBatch(tenant, _counted(BatchObject.model_validate_json(text), completed, failed))
            for tenant, text, completed, failed in rows
        ]


# Of `batches`: those that are not over, and of them those whose input file is the parameter.
_UNFINISHED = f"status NOT IN ({', '.join(map(repr, FINAL))})"
_READS = f"json_extract(object, '$.input_file_id') = ? AND {_UNFINISHED}"


def _counted(batch: BatchObject, completed: int, failed: int) -> BatchObject:
    counts = RequestCounts(total=batch.request_counts.total, completed=completed, failed=failed)
    return batch.model_copy(update={"request_counts": counts})


def _insert_file(database: sqlite3.Connection, tenant: str, file: FileObject) -> None:
    database.execute(
        "INSERT OR REPLACE INTO files (id, tenant, bytes, purpose, expires_at, object) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, tenant, file.bytes, file.purpose, file.expires_at, file.model_dump_json()),
    )


def _update_batch(database: sqlite3.Connection, batch: BatchObject) -> None:
    row = (batch.status, batch.model_dump_json(), batch.id)
    database.execute("UPDATE batches SET status = ?, object = ? WHERE id = ?", row)
