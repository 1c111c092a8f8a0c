"""Files and batches of tenants, within bounds, as the API's endpoints see them.

Where they lie is a `BatchPlace`: a folder of this machine, or a server that several gateways share. All methods block:
call them in threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from pipeline.gateway.api.batches.claims import (
    SELECT_BATCHES,
    UNFINISHED,
    BatchClaims,
    BatchRows,
    new_file_id,
)
from pipeline.gateway.api.batches.objects import FINAL, BatchObject, FileObject
from pipeline.gateway.api.batches.places import BatchPlace
from pipeline.gateway.database import Execute, known_form, marks
from pipeline.gateway.errors import ApiError

_ABANDONED_S = 24 * 3600.0  # age of bytes without a file, which no process writes any more
_KEPT_S = 30 * 24 * 3600  # input files, and batches that are over
_PAGE = 256  # rows that are read at once
_COPIED_BYTES = 2**17  # at once


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """How much may be kept.

    Attributes:
        file_bytes: most bytes of an upload.
        tenant_bytes: most bytes of all files of a tenant. Output of its batches is kept even beyond that, and counts.
        tenant_files: most files of a tenant, output of its batches included.
        unfinished: most batches of a tenant that are not over.
        finished: most batches of a tenant that are over; beyond that, the oldest are forgotten.
    """

    file_bytes: int = 200 * 2**20
    tenant_bytes: int = 4 * 2**30
    tenant_files: int = 100_000
    unfinished: int = 100
    finished: int = 10_000


class BatchStorage(BatchRows):
    """Files and batches of tenants; `claims` are the same batches for the runner.

    Methods that take an id raise `ApiError` (404) if the tenant has nothing of this id.
    """

    def __init__(self, place: BatchPlace, limits: StorageLimits = StorageLimits()) -> None:
        super().__init__(place)
        self.limits, self.claims = limits, BatchClaims(place)

    @property
    def in_use(self) -> bool:
        """Whether anything may be kept here."""
        return self._place.in_use

    def close(self) -> None:
        """Close the database."""
        self._place.close()

    # Files

    def add_file(
        self, tenant: str, content: BinaryIO, filename: str, expires_s: int | None = None
    ) -> FileObject:
        """Keep a file that was uploaded for a batch.

        Args:
            expires_s: seconds for which it is kept; None: 30 days.

        Raises:
            ApiError: 413, if the tenant has too many files or bytes; 507, if the disk is full.
        """
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        now = int(time.time())
        file = FileObject(
            id=new_file_id(), bytes=size, created_at=now, expires_at=now + (expires_s or _KEPT_S),
            filename=filename, purpose="batch",
        )  # fmt: skip
        with self._place.transaction(tenant) as execute:
            self._check_room(execute, tenant, size)
        self._place.write(file.id, iter(partial(content.read, _COPIED_BYTES), b""))
        try:
            with self._place.transaction(tenant) as execute:
                self._check_room(execute, tenant, size)
                self._insert_file(execute, tenant, file)
        except BaseException:
            self._remove_contents((file.id,))
            raise
        return file

    def file(self, tenant: str, id: str) -> FileObject:
        """Return a file."""
        rows = self._place.read(
            "SELECT id, object FROM files WHERE id = %s AND tenant = %s", known_form(id), tenant
        )
        for file in self._files(rows):
            return file
        raise _no_file(id)

    def open_content(self, tenant: str, id: str) -> BinaryIO:
        """Open the bytes of a file for reading."""
        return self._place.open(self.file(tenant, id).id)

    def files(
        self, tenant: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> Sequence[FileObject]:
        """List files of a tenant: at most `limit` from that which follows `after`."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where, values = "tenant = %s", [tenant]
        if purpose is not None:
            where, values = f"{where} AND purpose = %s", [*values, known_form(purpose)]
        if after is not None:
            where += f" AND n {sign} (SELECT n FROM files WHERE id = %s AND tenant = %s)"
            values += [known_form(after), tenant]
        query = f"SELECT id, object FROM files WHERE {where} ORDER BY n {order} LIMIT %s"
        return self._files(self._place.read(query, *values, limit))

    def delete_file(self, tenant: str, id: str) -> None:
        """Delete a file. Raises `ApiError` (409) if a batch that is not over reads it."""
        id = known_form(id)
        with self._place.transaction(tenant) as execute:
            self._check_file(execute, tenant, id)
            if (using := self._unfinished_inputs(execute, tenant).get(id)) is not None:
                text = f"The file {id} is read by {using}, which is not over: cancel it first"
                raise ApiError(409, text, code="file_in_use")
            execute("DELETE FROM files WHERE id = %s AND tenant = %s", id, tenant)
        self._place.remove(id)

    # Batches

    def add_batch(self, tenant: str, batch: BatchObject, output_expires_s: int | None) -> BatchObject:
        """Keep a new batch, and the files that it ends in for `output_expires_s`; None: until they are deleted.

        Raises:
            ApiError: 404, if its input file does not exist; 413, if the tenant's files leave no room for those that
                it will end in; 429, if too many batches of the tenant are not over.
        """
        with self._place.transaction(tenant) as execute:
            self._check_file(execute, tenant, known_form(batch.input_file_id))
            self._check_room(execute, tenant, 1)
            count = execute(
                f"SELECT count(*) FROM batches WHERE tenant = %s AND {UNFINISHED}", tenant
            ).fetchone()[0]
            if count >= self.limits.unfinished:
                text = f"{count} batches of yours are not over; wait for one, or cancel it"
                raise ApiError(429, text, code="batch_limit", retry_after_s=60)
            row = (batch.id, tenant, batch.status, output_expires_s, self._sealed(batch))
            execute(
                f"INSERT INTO batches (id, tenant, status, output_expires_s, object) VALUES {marks(row)}",
                *row,
            )
            execute(
                f"DELETE FROM batches WHERE tenant = %s AND NOT {UNFINISHED} AND n <= (SELECT n FROM batches"
                f" WHERE tenant = %s AND NOT {UNFINISHED} ORDER BY n DESC LIMIT 1 OFFSET %s)",
                *(tenant, tenant, self.limits.finished),
            )
        return batch

    def batch(self, tenant: str, id: str) -> BatchObject:
        """Return a batch with the counts of now."""
        query = f"{SELECT_BATCHES} WHERE id = %s AND tenant = %s"
        return self._only_batch(self._place.read(query, known_form(id), tenant), id)

    def batches(
        self, tenant: str, *, prefix: str = "batch", after: str | None, before: str | None = None, limit: int
    ) -> Sequence[BatchObject]:
        """List batches of a tenant, the newest first.

        Args:
            tenant: name of the tenant.
            prefix: beginning of their ids.
            after: only those that follow it, from the first on.
            before: only those that come before it; without `after` up to the last of them.
            limit: most batches.
        """
        where, values = "tenant = %s AND id LIKE %s", [tenant, f"{prefix}%"]
        for id, sign in ((after, "<"), (before, ">")):
            if id is not None:
                where += f" AND n {sign} (SELECT n FROM batches WHERE id = %s AND tenant = %s)"
                values += [known_form(id), tenant]
        from_end = before is not None and after is None
        order = "ASC" if from_end else "DESC"
        rows = self._place.read(f"{SELECT_BATCHES} WHERE {where} ORDER BY n {order} LIMIT %s", *values, limit)
        batches = [owned.batch for owned in self._batches(rows)]
        return batches[::-1] if from_end else batches

    def delete_batch(self, tenant: str, id: str) -> BatchObject:
        """Delete a batch, but not its files, and return it. Raises `ApiError` (400) if it is not over."""
        id = known_form(id)
        with self._place.transaction(id) as execute:
            rows = execute(f"{SELECT_BATCHES} WHERE id = %s AND tenant = %s", id, tenant).fetchall()
            batch = self._only_batch(rows, id)
            if batch.status not in FINAL:
                raise ApiError(
                    400, f"Batch {id} cannot be deleted before it has ended: cancel it", param="id"
                )
            execute("DELETE FROM batches WHERE id = %s AND tenant = %s", id, tenant)
        return batch

    def change(self, tenant: str, id: str, change: Callable[[BatchObject], BatchObject]) -> BatchObject:
        """Replace a batch by what `change` makes of it, in one transaction. What it raises is raised here."""
        id = known_form(id)
        with self._place.transaction(id) as execute:
            rows = execute(f"{SELECT_BATCHES} WHERE id = %s AND tenant = %s", id, tenant).fetchall()
            changed = change(self._only_batch(rows, id))
            self._update_batch(execute, changed)
        return changed

    def sweep(self) -> None:
        """Remove files that have expired, batches that are long over, and what processes that died left behind."""
        now = int(time.time())
        expired = "expires_at <= %s"
        for (tenant,) in self._place.read(f"SELECT DISTINCT tenant FROM files WHERE {expired}", now):
            with self._place.transaction(tenant) as execute:
                query = f"SELECT id FROM files WHERE tenant = %s AND {expired}"
                inputs = self._unfinished_inputs(execute, tenant)
                gone = [row[0] for row in execute(query, tenant, now).fetchall() if row[0] not in inputs]
                for id in gone:
                    execute("DELETE FROM files WHERE id = %s AND tenant = %s", id, tenant)
            for id in gone:
                self._place.remove(id)
        for id in self._finished_before(now - _KEPT_S):
            with self._place.transaction(id) as execute:
                execute("DELETE FROM batches WHERE id = %s", id)
        self._place.remove_unknown(_ABANDONED_S)

    def _check_room(self, execute: Execute, tenant: str, size: int) -> None:
        """Refuse a file of `size` bytes if a tenant has too many files or bytes already."""
        files, used = execute(
            "SELECT count(*), CAST(coalesce(sum(bytes), 0) AS bigint) FROM files WHERE tenant = %s", tenant
        ).fetchone()
        limits = self.limits
        if used + size > limits.tenant_bytes:
            text = (
                f"Your files have {used} bytes; with this one they would have more than "
                f"{limits.tenant_bytes}: delete some"
            )
            raise ApiError(413, text, code="storage_limit")
        if files >= limits.tenant_files:
            raise ApiError(413, f"You have {files} files: delete some", code="storage_limit")

    def _check_file(self, execute: Execute, tenant: str, id: str) -> None:
        if execute("SELECT 1 FROM files WHERE id = %s AND tenant = %s", id, tenant).fetchone() is None:
            raise _no_file(id)

    def _only_batch(self, rows: Iterable[Sequence[Any]], id: str) -> BatchObject:
        for owned in self._batches(rows):
            return owned.batch
        raise no_batch(id)

    def _unfinished_inputs(self, execute: Execute, tenant: str) -> dict[str, str]:
        """Input file -> batch, of the batches of a tenant that are not over."""
        rows = execute(f"{SELECT_BATCHES} WHERE tenant = %s AND {UNFINISHED}", tenant).fetchall()
        batches = [owned.batch for owned in self._batches(rows)]
        return {batch.input_file_id: batch.id for batch in batches}

    def _finished_before(self, created_at: int) -> Iterator[str]:
        """Ids of batches that are over, from the oldest to the first that was created later."""
        query = f"SELECT n FROM batches WHERE NOT {UNFINISHED} AND n > %s ORDER BY n LIMIT {_PAGE}"
        last = -1
        while numbers := [row[0] for row in self._place.read(query, last)]:
            rows = self._place.read(f"{SELECT_BATCHES} WHERE n IN {marks(numbers)} ORDER BY n", *numbers)
            for owned in self._batches(rows):
                if owned.batch.created_at > created_at:
                    return
                yield owned.batch.id
            last = numbers[-1]


def no_batch(id: str) -> ApiError:
    """Return the answer to a request for a batch that a tenant does not have."""
    return ApiError(404, f"No batch found with id '{id[:64]}'", param="id", code="batch_not_found")


def _no_file(id: str) -> ApiError:
    return ApiError(404, f"No such File object: {id[:64]}", param="id", code="file_not_found")
