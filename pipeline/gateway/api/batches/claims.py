"""Rows of files and batches, and batches as the gateways that run them see them.

A batch is run by the gateway that claims it, which renews its claim until the batch is over. Another gateway claims it
when it was not renewed in time; whatever the first gateway still writes is then refused. An answer is kept once
for each line of a batch, so that nothing is written twice however often a batch is begun. All methods block.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from pipeline.cache.encryption import UnreadableEntry
from pipeline.gateway.api.batches.objects import (
    FINAL,
    BatchFaults,
    BatchObject,
    BatchStatus,
    FileObject,
    RequestCounts,
)
from pipeline.gateway.api.batches.places import BatchPlace
from pipeline.gateway.database import Execute, marks
from pipeline.gateway.errors import ApiError

# Seconds after which a claim ends that was not renewed.
CLAIM_S = 15.0
_PAGE = 256  # rows that are read or written at once
SELECT_BATCHES = "SELECT id, tenant, object, completed, failed FROM batches"
UNFINISHED = f"(status NOT IN ({', '.join(map(repr, FINAL))}))"
_CLAIMED = f"{SELECT_BATCHES} JOIN claims ON batch = id WHERE id = %s AND tenant = %s AND run = %s"


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
        for id, sealed in rows:
            with suppress(UnreadableEntry):
                files.append(FileObject.model_validate_json(self._place.codec.open(sealed, _object_key(id))))
        return files

    def _batches(self, rows: Iterable[Sequence[Any]]) -> list[OwnedBatch]:
        """Batches of rows of `SELECT_BATCHES`, with the counts of now."""
        batches = []
        for id, tenant, sealed, completed, failed in rows:
            with suppress(UnreadableEntry):
                batch = BatchObject.model_validate_json(self._place.codec.open(sealed, _object_key(id)))
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


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one gateway to run a batch.

    Attributes:
        run: number of the claim; the next claim of the batch has a higher number.
    """

    tenant: str
    id: str
    run: int


class ClaimLost(Exception):
    """Another gateway runs the batch by now."""


class BatchClaims(BatchRows):
    """Rows of files and batches, and batches as the gateways that run them see them.

    Methods that take a claim raise `ClaimLost` if another gateway runs the batch, or it is over.
    """

    def claimable(self) -> Sequence[OwnedBatch]:
        """Return the unfinished batches of all tenants that no gateway runs, the oldest first."""
        rows = self._place.read(
            f"{SELECT_BATCHES} LEFT JOIN claims ON batch = id"
            f" WHERE {UNFINISHED} AND (until IS NULL OR until <= clock()) ORDER BY n"
        )
        return self._batches(rows)

    def claim(self, tenant: str, id: str) -> Claim | None:
        """Claim a batch for `CLAIM_S` seconds; None if it is over, or another gateway runs it."""
        with self._place.transaction(id) as execute:
            query = f"SELECT 1 FROM batches WHERE id = %s AND tenant = %s AND {UNFINISHED}"
            if execute(query, id, tenant).fetchone() is None:
                return None
            last = execute("SELECT run, until > clock() FROM claims WHERE batch = %s", id).fetchone()
            if last is not None and last[1]:
                return None
            run = 1 if last is None else last[0] + 1
            execute(
                "INSERT INTO claims (batch, run, until) VALUES (%s, %s, clock() + %s)"
                " ON CONFLICT (batch) DO UPDATE SET run = excluded.run, until = excluded.until",
                *(id, run, CLAIM_S),
            )
        return Claim(tenant, id, run)

    def claimed(self, claim: Claim) -> BatchObject:
        """Return the batch of a claim with the counts of now."""
        return self._only(self._place.read(_CLAIMED, claim.id, claim.tenant, claim.run), claim)

    def change(self, claim: Claim, change: Callable[[BatchObject], BatchObject]) -> BatchObject:
        """Replace a batch by what `change` makes of it, in one transaction."""
        with self._place.transaction(claim.id) as execute:
            changed = change(self._claimed(execute, claim))
            self._update_batch(execute, changed)
        return changed

    def renew(self, claim: Claim) -> None:
        """Keep a claim for another `CLAIM_S` seconds."""
        self._claim_until(claim, CLAIM_S)

    def release(self, claim: Claim) -> None:
        """Give a claim back, so that another gateway may go on at once."""
        with suppress(ClaimLost):
            self._claim_until(claim, 0.0)

    def add_answers(self, claim: Claim, answers: Iterable[tuple[int, bool, str]]) -> None:
        """Keep answers to requests of a batch, in one transaction. A line that has an answer keeps it.

        Args:
            answers: number of the line of the input file, whether the request failed, line of the output or error file.
        """
        id, left = claim.id, iter(answers)
        with self._place.transaction(id) as execute:
            _check_claim(execute, claim)
            while page := tuple(islice(left, _PAGE)):
                rows = [
                    (id, line, int(failed), self._place.codec.seal(text.encode(), _answer_key(id, line)))
                    for line, failed, text in page
                ]
                added = execute(
                    f"INSERT INTO answers (batch, line, failed, text) VALUES {', '.join(map(marks, rows))}"
                    " ON CONFLICT DO NOTHING RETURNING failed",
                    *chain.from_iterable(rows),
                ).fetchall()
                failed = sum(row[0] for row in added)
                counted = "UPDATE batches SET completed = completed + %s, failed = failed + %s WHERE id = %s"
                execute(counted, len(added) - failed, failed, id)

    def answered(self, id: str) -> set[int]:
        """Return the lines of a batch that have an answer."""
        return {row[0] for row in self._place.read("SELECT line FROM answers WHERE batch = %s", id)}

    def count_loss(self, id: str, line: int) -> int:
        """Count a server that was lost while it worked on a line of a batch, and return how many were."""
        with self._place.transaction(id) as execute:
            times: int = execute(
                "INSERT INTO losses (batch, line, times) VALUES (%s, %s, 1)"
                " ON CONFLICT (batch, line) DO UPDATE SET times = losses.times + 1 RETURNING times",
                *(id, line),
            ).fetchone()[0]
        return times

    def losses(self, id: str) -> dict[int, int]:
        """Return how many servers were lost with each line of a batch, without lines with none."""
        return dict(self._place.read("SELECT line, times FROM losses WHERE batch = %s", id))

    def finish(self, claim: Claim, status: BatchStatus, errors: BatchFaults | None = None) -> BatchObject:
        """Write the answers of a batch into its output and error files, and end it with `status`.

        It may be called again after a failure or a death in its middle. `errors` are faults of the input file.
        """
        id, tenant, now = claim.id, claim.tenant, int(time.time())
        ((expires_s,),) = self._place.read("SELECT output_expires_s FROM batches WHERE id = %s", id)
        files: dict[str, FileObject] = {}
        try:
            for failed, kind in ((0, "output"), (1, "error")):
                answers = self._answers(id, failed)
                if (first := next(answers, None)) is None:
                    continue
                file_id = new_file_id()
                size = self._place.write(file_id, (line + b"\n" for line in chain((first,), answers)))
                files[f"{kind}_file_id"] = FileObject(
                    id=file_id, bytes=size, created_at=now, expires_at=None if expires_s is None else now + expires_s,
                    filename=f"{id}_{kind}.jsonl", purpose="batch_output",
                )  # fmt: skip
            with self._place.transaction(id) as execute:
                batch = self._claimed(execute, claim)
                for file in files.values():
                    self._insert_file(execute, tenant, file)
                ended = batch.entered(
                    status, now, errors=errors, **{key: file.id for key, file in files.items()}
                )
                self._update_batch(execute, ended)
                for table in ("answers", "losses", "claims"):
                    execute(f"DELETE FROM {table} WHERE batch = %s", id)
        except BaseException:
            self._remove_contents([file.id for file in files.values()])
            raise
        return ended

    def _claimed(self, execute: Execute, claim: Claim) -> BatchObject:
        return self._only(execute(_CLAIMED, claim.id, claim.tenant, claim.run).fetchall(), claim)

    def _only(self, rows: Sequence[Sequence[object]], claim: Claim) -> BatchObject:
        for owned in self._batches(rows):
            return owned.batch
        raise ClaimLost(claim.id)

    def _claim_until(self, claim: Claim, seconds: float) -> None:
        with self._place.transaction(claim.id) as execute:
            _check_claim(execute, claim)
            execute("UPDATE claims SET until = clock() + %s WHERE batch = %s", seconds, claim.id)

    def _answers(self, id: str, failed: int) -> Iterator[bytes]:
        """Lines in the order of the input file, read in parts: all of them may be large."""
        line = -1
        while rows := self._place.read(
            "SELECT line, text FROM answers WHERE batch = %s AND failed = %s AND line > %s"
            f" ORDER BY line LIMIT {_PAGE}",
            *(id, failed, line),
        ):
            for line, sealed in rows:
                yield self._place.codec.open(sealed, _answer_key(id, line))


def _check_claim(execute: Execute, claim: Claim) -> None:
    row = execute("SELECT run FROM claims WHERE batch = %s", claim.id).fetchone()
    if row is None or row[0] != claim.run:
        raise ClaimLost(claim.id)


def _answer_key(batch: str, line: int) -> bytes:
    """Bind a sealed answer to its line."""
    return f"answer\0{batch}\0{line}".encode()
