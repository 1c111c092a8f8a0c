"""Answers the requests of batches beside those of clients, in slots of the model that clients leave.

Each request goes through the gateway's own application, as if it had come over HTTP, so that it is checked, answered,
logged and counted as any other. A batch that was begun by a process which died is gone on with: requests that have an
answer on the disk are not asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from pipeline.gateway.batches.input_file import InputFile
from pipeline.gateway.batches.objects import FINAL, BatchFaults, BatchObject, BatchStatus
from pipeline.gateway.batches.storage import BatchStorage, OwnedBatch
from pipeline.gateway.context import GatewayContext
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits

_log = logging.getLogger("pipeline.gateway")

_POLL_S = 1.0  # how soon a batch, or its cancellation, of another gateway is seen
_SWEEP_S = 3600.0
_RETRY_S = 5.0  # after a disk, or a model, could not be used
_BATCHES_OF_TENANT = 2  # that are run at once
_CHUNK = 256  # answers in one transaction
_ENVELOPE_BYTES = 8 * 1024  # of a line besides the body of its request
# Statuses of answers that say that the request may be asked again later.
_LATER = (429, 503)
_NOT_ASKED = "This request could not be executed before the completion window expired."


@dataclass(slots=True)
class _Run:
    """A batch that this process runs."""

    batch: BatchObject
    tenant: Tenant
    input: InputFile
    pending: Iterator[int]  # requests that have no answer, and are not being asked
    unkept: list[tuple[int, bool, str]] = field(default_factory=list)  # answers that are not on the disk
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)


class BatchRunner:
    """Runs all batches of a folder whose models this gateway serves, but for those that another process runs."""

    def __init__(self, storage: BatchStorage, context: GatewayContext) -> None:
        """
        Args:
            storage: of the batches.
            context: of the gateway; its `application` answers the requests.
        """
        self._storage, self._context = storage, context
        self._running: dict[str, asyncio.Task[None]] = {}  # by id of the batch
        self._of_tenant: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._fault = ""  # of the storage

    def start(self) -> None:
        """Begin to look for batches."""
        self._task = asyncio.create_task(self._follow())

    def wake(self) -> None:
        """Look for batches now: one was made, or cancelled."""
        self._changed.set()

    async def aclose(self) -> None:
        """Leave all batches as they are; whoever opens the folder next goes on with them."""
        tasks = [*self._running.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        swept_at = -_SWEEP_S
        while True:
            if not self._context.draining and self._storage.in_use:
                try:
                    if time.monotonic() - swept_at >= _SWEEP_S:
                        swept_at = time.monotonic()
                        await asyncio.to_thread(self._storage.sweep)
                    for owned in await asyncio.to_thread(self._storage.unfinished):
                        self._begin(owned)
                    self._fault = ""
                except ApiError as error:
                    self._note(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)
            self._changed.clear()

    def _begin(self, owned: OwnedBatch) -> None:
        batch, tenant = owned.batch, owned.tenant
        if (
            batch.id in self._running
            or not self._may_run(batch)
            or self._of_tenant[tenant] >= _BATCHES_OF_TENANT
        ):
            return
        task = self._running[batch.id] = asyncio.create_task(self._run(owned))
        self._of_tenant[tenant] += 1

        def ended(_: asyncio.Task[None]) -> None:
            del self._running[batch.id]
            self._of_tenant[tenant] -= 1

        task.add_done_callback(ended)

    def _may_run(self, batch: BatchObject) -> bool:
        """Whether anything can be done now: not if the model of the requests is served by others only."""
        waits = batch.status == "in_progress" and batch.model not in self._context.model_names()
        return not waits or batch.expires_at <= time.time()

    async def _run(self, owned: OwnedBatch) -> None:
        try:
            with self._storage.claim(owned.batch.id) as held:
                if held:
                    # It may have gone on, or ended, in another process.
                    batch = await asyncio.to_thread(self._storage.batch, owned.tenant, owned.batch.id)
                    if batch.status not in FINAL:
                        await self._advance(owned.tenant, batch)
        except ApiError as error:
            self._note(error)
            await asyncio.sleep(_RETRY_S)
        except Exception:
            _log.exception("%s: cannot go on; it is begun again", owned.batch.id)
            await asyncio.sleep(_RETRY_S)

    async def _advance(self, tenant: str, batch: BatchObject) -> None:
        """Bring a batch that this process holds to its end."""
        storage = self._storage
        path = await asyncio.to_thread(storage.content, tenant, batch.input_file_id)
        max_line_bytes = self._context.max_body_bytes + _ENVELOPE_BYTES
        input_file = await asyncio.to_thread(InputFile, path, max_line_bytes)
        try:
            if batch.status == "validating":
                names = self._context.model_names()
                model, faults = await asyncio.to_thread(input_file.check, batch.endpoint, names)
                if faults:
                    await asyncio.to_thread(storage.finish, batch.id, "failed", BatchFaults(data=faults))
                    return
                batch = await self._enter(batch, "in_progress", model, len(input_file))
            if batch.status == "in_progress":
                batch = await self._answer_all(tenant, batch, input_file)
        finally:
            input_file.close()
        ends: dict[BatchStatus, BatchStatus] = {"cancelling": "cancelled", "finalizing": "completed"}
        if batch.status in ends:
            ended = await asyncio.to_thread(storage.finish, batch.id, ends[batch.status])
            counts = ended.request_counts
            _log.info("%s: %s: %d of %d", batch.id, ended.status, counts.completed, counts.total)

    async def _enter(
        self, batch: BatchObject, status: BatchStatus, model: str | None, total: int
    ) -> BatchObject:
        """Bring a batch into another state, unless it was cancelled meanwhile."""

        def enter(now: BatchObject) -> BatchObject:
            if now.status == "cancelling":
                return now
            counts = now.request_counts.model_copy(update={"total": total})
            return now.entered(status, time.time(), model=model, request_counts=counts)

        return await asyncio.to_thread(self._storage.change, batch.id, enter)

    async def _answer_all(self, tenant: str, batch: BatchObject, input_file: InputFile) -> BatchObject:
        """Ask all requests that have no answer, until that is done, or the batch is cancelled or expires."""
        answered = await asyncio.to_thread(self._storage.answered, batch.id)
        left = [index for index in range(len(input_file)) if index not in answered]
        run = _Run(batch, Tenant(tenant, TenantLimits(), background=True), input_file, iter(left))
        workers = [asyncio.create_task(self._work(run)) for _ in range(min(len(left), self._width(batch)))]
        try:
            while True:
                _, asking = await asyncio.wait(workers, timeout=_POLL_S) if workers else (set(), set())
                for worker in workers:
                    if worker.done():
                        worker.result()
                batch = await asyncio.to_thread(self._storage.batch, tenant, batch.id)
                if batch.status == "cancelling":
                    return batch
                if batch.expires_at <= time.time():
                    break
                if not asking:
                    return await self._enter(batch, "finalizing", batch.model, len(input_file))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        await self._expire(batch, input_file)
        return batch

    def _width(self, batch: BatchObject) -> int:
        """How many requests of a batch wait for slots, or have one, at once."""
        # An encoder works in threads, without a queue.
        if batch.endpoint == "/v1/embeddings":
            return 1
        return self._context.find_model(batch.model or "").queue.background_slots

    async def _work(self, run: _Run) -> None:
        for index in run.pending:
            line = await asyncio.to_thread(run.input.read, index)
            body, request_id = json.dumps(line.body).encode(), f"{run.batch.id}-{index}"
            while True:
                if self._context.draining:
                    return
                status, answer = await ask(self._context.application, line.url, body, run.tenant, request_id)
                if status not in _LATER:
                    break
                await asyncio.sleep(_RETRY_S)
            response = {"status_code": status, "request_id": request_id, "body": json.loads(answer)}
            await self._keep(
                run, index, status >= 300, _output_line(request_id, line.custom_id, response, None)
            )

    async def _keep(self, run: _Run, index: int, failed: bool, text: str) -> None:
        """Return when an answer is on the disk. Answers that come meanwhile are kept together."""
        run.unkept.append((index, failed, text))
        async with run.keeping:
            answers, run.unkept = run.unkept, []
            while answers:
                try:
                    await asyncio.to_thread(self._storage.add_answers, run.batch.id, answers)
                    return
                except ApiError as error:
                    self._note(error)
                    await asyncio.sleep(_RETRY_S)

    async def _expire(self, batch: BatchObject, input_file: InputFile) -> None:
        """End a batch whose time is over; requests without an answer get an error that says so."""
        storage, error = self._storage, {"code": "batch_expired", "message": _NOT_ASKED}

        def expire() -> None:
            answered = storage.answered(batch.id)
            left = [index for index in range(len(input_file)) if index not in answered]
            for first in range(0, len(left), _CHUNK):
                lines = [(index, input_file.read(index).custom_id) for index in left[first : first + _CHUNK]]
                storage.add_answers(
                    batch.id,
                    [
                        (index, True, _output_line(f"{batch.id}-{index}", custom_id, None, error))
                        for index, custom_id in lines
                    ],
                )
            storage.finish(batch.id, "expired")

        await asyncio.to_thread(expire)

    def _note(self, error: ApiError) -> None:
        """Log what is wrong with the storage, once."""
        if error.message != self._fault:
            _log.error("batches wait: %s (%s)", error.message, self._storage.folder)
        self._fault = error.message


async def ask(
    application: ASGIApp, path: str, body: bytes, tenant: Tenant, request_id: str
) -> tuple[int, bytes]:
    """Send a POST request to the gateway's own application.

    Args:
        application: of the gateway, without the guards against web pages.
        path: of the endpoint.
        body: JSON.
        tenant: whose request it is.
        request_id: unique among all requests.

    Returns:
        Status and body of the response.
    """
    status, answer, sent = 500, bytearray(), False
    scope: Scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "query_string": b"",
        "root_path": "", "client": None, "server": None, "tenant": tenant,
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
    }  # fmt: skip

    async def receive() -> Message:
        nonlocal sent
        if sent:
            # The "client" stays until it has its answer.
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer.extend(message.get("body", b""))

    await application(scope, receive, send)
    return status, bytes(answer)


def _output_line(
    request_id: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> str:
    """A line of the output or error file, as OpenAI's."""
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))
