"""Answers the requests of batches beside those of clients, in slots of the model that clients leave.

Each request goes through the gateway's own application, as if it had come over HTTP, so that it is checked, answered,
logged and counted as any other. A batch that was begun by a gateway which died is gone on with by another gateway:
requests whose answers are kept are not asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ParamSpec, TypeVar

from starlette.types import ASGIApp, Message, Scope

from pipeline.gateway.api.batches.claims import CLAIM_S, Claim, ClaimLost, OwnedBatch
from pipeline.gateway.api.batches.objects import EXPIRED, BatchFaults, BatchObject, BatchStatus, InputFile
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.blame import MAX_LOSSES
from pipeline.gateway.context import GatewayContext
from pipeline.gateway.errors import QUARANTINED, ApiError
from pipeline.gateway.limits import Tenant, TenantLimits

_log = logging.getLogger("pipeline.gateway")

_POLL_S = 1.0  # how soon a batch, or its cancellation, of another gateway is seen
_SWEEP_S = 3600.0
_RETRY_S = 5.0  # after the storage, or a model, could not be used
_RENEW_S = CLAIM_S / 5
_BATCHES_OF_TENANT = 2  # batches of one tenant that run at once
_CHUNK = 256  # answers in one transaction
_ENVELOPE_BYTES = 8 * 1024  # bytes of a line besides the body of its request
# Statuses of answers that say that the request may be asked again later.
_LATER = (429, 503)
_LOST = {
    "code": QUARANTINED,
    "message": f"Servers were lost {MAX_LOSSES} times while they worked on this request, which may be the cause.",
}
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_NOT_ASKED = "This request could not be executed before the completion window expired."


@dataclass(slots=True)
class _Run:
    """A batch that this process runs."""

    claim: Claim
    batch: BatchObject
    tenant: Tenant
    input: InputFile
    pending: Iterator[int]  # requests that have no answer, and are not being asked
    losses: dict[int, int]  # request -> servers that were lost while they worked on it
    unkept: list[tuple[int, bool, str]] = field(default_factory=list)  # answers that are not in the storage
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Held by a request at whose loss another gateway was: what of several is the cause, only one by one can tell.
    suspects: asyncio.Lock = field(default_factory=asyncio.Lock)


class _BatchTenant(Tenant):
    """Tenant of a batch; losses of servers by its lines are counted beyond the end of this process."""

    def __init__(
        self, claim: Claim, count: Callable[[str, int], Awaitable[None]], losses: dict[int, int]
    ) -> None:
        super().__init__(claim.tenant, TenantLimits(), background=True)
        self._batch, self._count, self._losses = claim.id, count, losses

    async def note_loss(self, request_id: str) -> int:
        line = int(request_id.rpartition("-")[2])
        self._losses[line] = self._losses.get(line, 0) + 1
        await self._count(self._batch, line)
        return self._losses[line]


class BatchRunner:
    """Runs all batches of a storage whose models this gateway serves, but for those that another gateway runs."""

    def __init__(self, storage: BatchStorage, context: GatewayContext) -> None:
        self._storage, self._claims, self._context = storage, storage.claims, context
        self._running: dict[str, asyncio.Task[None]] = {}  # by id of the batch
        self._of_tenant: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._fault = ""  # last fault of the storage

    def start(self) -> None:
        """Begin to look for batches."""
        self._task = asyncio.create_task(self._follow())

    def wake(self) -> None:
        """Look for batches now: a batch was made, or cancelled."""
        self._changed.set()

    async def aclose(self) -> None:
        """Leave all batches as they are, for other gateways to go on with."""
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
                        await self._context.use_state(self._storage.sweep)
                    for owned in await self._context.use_state(self._claims.claimable):
                        self._begin(owned)
                    self._fault = ""
                except ApiError as error:
                    self._note(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)
            self._changed.clear()

    def _begin(self, owned: OwnedBatch) -> None:
        batch, tenant = owned.batch, owned.tenant
        served = batch.status != "in_progress" or batch.model in self._context.model_names()
        if batch.id in self._running or self._of_tenant[tenant] >= _BATCHES_OF_TENANT:
            return
        if not served and batch.expires_at > time.time():
            return
        task = self._running[batch.id] = asyncio.create_task(self._run(owned))
        self._of_tenant[tenant] += 1

        def ended(_: asyncio.Task[None]) -> None:
            del self._running[batch.id]
            self._of_tenant[tenant] -= 1

        task.add_done_callback(ended)

    async def _run(self, owned: OwnedBatch) -> None:
        try:
            claim = await self._context.use_state(self._claims.claim, owned.tenant, owned.batch.id)
            if claim is not None:
                async with self._renewing(claim):
                    await self._advance(claim)
        except ClaimLost:
            _log.warning("%s: another gateway goes on with it", owned.batch.id)
        except ApiError as error:
            self._note(error)
            await asyncio.sleep(_RETRY_S)
        except Exception:
            _log.exception("%s: cannot go on; it is begun again", owned.batch.id)
            await asyncio.sleep(_RETRY_S)

    @asynccontextmanager
    async def _renewing(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a claim in the block, and give it back after it."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(_RENEW_S)
                # Whether it is lost is found out where the batch is read and written.
                with suppress(ApiError, ClaimLost):
                    await self._context.use_state(self._claims.renew, claim)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            with suppress(ApiError):
                await self._context.use_state(self._claims.release, claim)

    async def _advance(self, claim: Claim) -> None:
        """Bring a batch that this process has claimed to its end."""
        claims, use = self._claims, self._context.use_state
        # It may have gone on in another gateway.
        batch = await use(claims.claimed, claim)
        max_line_bytes = self._context.max_body_bytes + _ENVELOPE_BYTES

        input_file = await use(
            lambda: InputFile(self._storage.open_content(claim.tenant, batch.input_file_id), max_line_bytes)
        )
        try:
            if batch.status == "validating":
                names = self._context.model_names()
                model, faults = await use(input_file.check, batch.endpoint, names)
                if faults:
                    await use(claims.finish, claim, "failed", BatchFaults(data=faults))
                    return
                batch = await self._enter(claim, "in_progress", model, len(input_file))
            if batch.status == "in_progress":
                batch = await self._answer_all(claim, batch, input_file)
        finally:
            await use(input_file.close)
        ends: dict[BatchStatus, BatchStatus] = {"cancelling": "cancelled", "finalizing": "completed"}
        if batch.status in ends:
            ended = await use(claims.finish, claim, ends[batch.status])
            counts = ended.request_counts
            _log.info("%s: %s: %d of %d", batch.id, ended.status, counts.completed, counts.total)

    async def _enter(self, claim: Claim, status: BatchStatus, model: str | None, total: int) -> BatchObject:
        """Bring a batch into another state, unless it was cancelled meanwhile."""

        def enter(now: BatchObject) -> BatchObject:
            if now.status == "cancelling":
                return now
            counts = now.request_counts.model_copy(update={"total": total})
            return now.entered(status, time.time(), model=model, request_counts=counts)

        return await self._context.use_state(self._claims.change, claim, enter)

    async def _answer_all(self, claim: Claim, batch: BatchObject, input_file: InputFile) -> BatchObject:
        """Ask all requests that have no answer, until that is done, or the batch is cancelled or expires."""
        answered = await self._context.use_state(self._claims.answered, claim.id)
        losses = await self._context.use_state(self._claims.losses, claim.id)
        unanswered = [index for index in range(len(input_file)) if index not in answered]
        run = _Run(
            claim, batch, _BatchTenant(claim, self._count_loss, losses), input_file, iter(unanswered), losses
        )
        workers = [
            asyncio.create_task(self._work(run)) for _ in range(min(len(unanswered), self._width(batch)))
        ]
        try:
            while True:
                _, asking = await asyncio.wait(workers, timeout=_POLL_S) if workers else (set(), set())
                for worker in workers:
                    if worker.done():
                        worker.result()
                batch = await self._patiently(self._claims.claimed, claim)
                if batch.status == "cancelling":
                    return batch
                if batch.expires_at <= time.time():
                    break
                if not asking:
                    if self._context.draining:
                        # The workers have left lines to other gateways.
                        return batch
                    return await self._enter(claim, "finalizing", batch.model, len(input_file))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        await self._expire(claim, input_file)
        return batch

    def _width(self, batch: BatchObject) -> int:
        """How many requests of a batch wait for slots, or have a slot, at once."""
        # An encoder works in threads, without a queue.
        if batch.endpoint == "/v1/embeddings":
            return 1
        return self._context.find_model(batch.model or "").queue.background_slots

    async def _work(self, run: _Run) -> None:
        for index in run.pending:
            line = await self._patiently(run.input.read, index)
            body, request_id = json.dumps(line.body).encode(), f"{run.batch.id}-{index}"
            response: dict[str, Any] | None = None
            while response is None and run.losses.get(index, 0) < MAX_LOSSES:
                if self._context.draining:
                    return
                async with run.suspects if run.losses.get(index) else nullcontext():
                    status, answer = await ask(
                        self._context.application, line.url, body, run.tenant, request_id
                    )
                if status in _LATER:
                    await asyncio.sleep(_RETRY_S)
                elif status < 500 or run.losses.get(index, 0) < MAX_LOSSES:
                    response = {"status_code": status, "request_id": request_id, "body": json.loads(answer)}
            failed = response is None or response["status_code"] >= 300
            error = _LOST if response is None else None
            await self._keep(run, index, failed, _output_line(request_id, line.custom_id, response, error))

    async def _count_loss(self, batch: str, line: int) -> None:
        # While the storage is away, a loss counts until this process ends.
        with suppress(ApiError):
            await self._context.use_state(self._claims.count_loss, batch, line)

    async def _keep(self, run: _Run, index: int, failed: bool, text: str) -> None:
        """Return when an answer is in the storage. Answers that come meanwhile are kept together."""
        run.unkept.append((index, failed, text))
        async with run.keeping:
            answers, run.unkept = run.unkept, []
            if answers:
                await self._patiently(self._claims.add_answers, run.claim, answers)

    async def _patiently(
        self, call: Callable[_Parameters, _Result], *arguments: _Parameters.args, **named: _Parameters.kwargs
    ) -> _Result:
        """Use the storage; wait while it cannot be used."""
        while True:
            try:
                return await self._context.use_state(call, *arguments, **named)
            except ApiError as error:
                self._note(error)
                await asyncio.sleep(_RETRY_S)

    async def _expire(self, claim: Claim, input_file: InputFile) -> None:
        """End a batch whose time is over; requests without an answer get an error that says so."""
        claims, error = self._claims, {"code": EXPIRED, "message": _NOT_ASKED}

        def expire() -> None:
            answered = claims.answered(claim.id)
            answers = (
                (
                    index,
                    True,
                    _output_line(f"{claim.id}-{index}", input_file.read(index).custom_id, None, error),
                )
                for index in range(len(input_file))
                if index not in answered
            )
            while chunk := list(islice(answers, _CHUNK)):
                claims.add_answers(claim, chunk)
            claims.finish(claim, "expired")

        await self._context.use_state(expire)

    def _note(self, error: ApiError) -> None:
        """Log what is wrong with the storage, once."""
        if error.message != self._fault:
            _log.error("batches wait: %s", error.message)
        self._fault = error.message


async def ask(
    application: ASGIApp, path: str, body: bytes, tenant: Tenant, request_id: str
) -> tuple[int, bytes]:
    """Send a POST request to the gateway's own application, without its guards; returns status and body."""
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
