"""A worker's side: places in the queue of a model, its readiness, and figures, which the parent has for all workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from math import inf
from socket import socket
from typing import Any

from pipeline.client import AsyncClient, ClientError
from pipeline.gateway.background import PreemptibleBlock
from pipeline.gateway.blame import Work
from pipeline.gateway.errors import ApiError
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.lost_servers import took_request
from pipeline.gateway.metrics import share_metrics
from pipeline.gateway.readiness import GatewayStatus, ModelStatus
from pipeline.gateway.records import CacheHit, CacheHits
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.settings import WorkerPlace
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.workers.link import LinkMessage, SharedUsage, WorkerLink

REPORT_S = 0.5
# The parent answers at once. It does not while it is stopped, and then it is started again with all its workers.
_ANSWER_S = 3.0


class GatewayWorker:
    """The parent of this worker, as its gateway asks it."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.hits: CacheHits = _SharedHits(self)
        self._link: WorkerLink | None = None
        self._numbers = count()
        self._leases: dict[int, asyncio.Future[None]] = {}
        self._blocks: dict[int, PreemptibleBlock] = {}  # by number of the lease
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._watched: dict[str, SharedReadiness] = {}
        self._report: Callable[[], Mapping[str, ModelStatus]] = dict
        self._reporting: asyncio.Task[None] | None = None

    @classmethod
    def join(cls, place: WorkerPlace, tenants: Tenants) -> GatewayWorker:
        """Share limits and metrics with the other workers from now on, and the rest when the gateway starts."""
        SharedUsage(place.usage, tenants, place.workers).share(place.number)
        share_metrics(place.metrics, place.number)
        return cls(place)

    async def connect(self, report: Callable[[], Mapping[str, ModelStatus]]) -> None:
        """Open the link, and begin to send what `report` returns."""
        self._report = report
        self._link = await WorkerLink.over(socket(fileno=self.place.link), self._receive, self._lose)
        self._reporting = asyncio.create_task(self._keep_reporting())

    async def aclose(self) -> None:
        """End the link; the parent frees what this worker holds."""
        if self._reporting is not None:
            self._reporting.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def share(self, model: ServedModel) -> None:
        """Give a model that was loaded here the queue, the readiness and the servers that all workers have."""
        queue, client = model.queue, model.client
        assert isinstance(queue, FairQueue), "it is shared once"
        model.queue = LeasedQueue(self, model.name, queue.slots, queue.batch_slots)
        model.readiness = SharedReadiness(self, model)
        # The parent asks DNS for all, and each worker has its part of what a server takes.
        client.stop_discovery()
        if client.slots is not None:
            client.slots = -(-client.slots // self.place.workers)

    def tell(self, op: str, **fields: Any) -> None:
        """Send a message that needs no answer."""
        if self._link is not None:
            self._link.send(op, **fields)

    async def ask(self, op: str, **fields: Any) -> Any:
        """Send a question, and return its answer.

        Raises:
            ApiError: 503, if the parent does not answer.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(op, number=number, **fields)
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            text = f"The gateway's parent process did not answer within {_ANSWER_S:g} s"
            raise ApiError(503, text, code="unavailable", retry_after_s=1) from None
        finally:
            del self._answers[number]

    async def status(self) -> GatewayStatus:
        """Return the status of all workers together."""
        self._send_report()
        return GatewayStatus.of_json(await self.ask("status"))

    def watch(self, readiness: SharedReadiness, **fields: Any) -> None:
        """Have the parent watch the servers of a model, and tell `readiness` how they are."""
        self._watched[readiness.key] = readiness
        self.tell("watch", key=readiness.key, **fields)

    def unwatch(self, readiness: SharedReadiness) -> None:
        """End what `watch` began."""
        if self._watched.get(readiness.key) is readiness:
            del self._watched[readiness.key]
            self.tell("unwatch", key=readiness.key)

    @asynccontextmanager
    async def lease(self, **wanted: Any) -> AsyncIterator[None]:
        """Wait for a place in a queue of the parent, and hold it. Raises what the queue does."""
        number = next(self._numbers)
        granted = self._leases[number] = asyncio.get_running_loop().create_future()
        block = self._blocks[number] = PreemptibleBlock()
        self.tell("acquire", lease=number, **wanted)
        ending: dict[str, Any] = {"answered": False}
        try:
            with block:
                await granted
                yield
            ending = {"answered": True}
        except ClientError as error:
            if took_request(error):
                ending = {"answered": False, "lost": error.url}
            raise
        finally:
            del self._leases[number], self._blocks[number]
            self.tell("release", lease=number, **ending)

    def _receive(self, message: LinkMessage) -> None:
        match message["op"]:
            case "granted" | "refused" as op:
                lease = self._leases.get(message["lease"])
                if lease is None or lease.done():
                    # It was given up meanwhile; `release` is under way.
                    return
                if op == "granted":
                    lease.set_result(None)
                else:
                    lease.set_exception(ApiError(**message["error"]))
            case "preempted":
                if (block := self._blocks.get(message["lease"])) is not None:
                    block.preempt()
            case "readiness":
                if (readiness := self._watched.get(message["key"])) is not None:
                    readiness.hear(message)
            case "answer":
                answer = self._answers.get(message["number"])
                if answer is not None and not answer.done():
                    answer.set_result(message["value"])

    def _lose(self) -> None:
        """End this worker: its parent is gone and grants no more slots; a new parent starts its own workers."""
        if self._link is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _send_report(self) -> None:
        models = {name: asdict(status) for name, status in self._report().items()}
        chunks = {key: readiness.last_chunks() for key, readiness in self._watched.items()}
        self.tell("report", models=models, chunks=chunks)

    async def _keep_reporting(self) -> None:
        while True:
            self._send_report()
            await asyncio.sleep(REPORT_S)


@dataclass(slots=True)
class LeasedQueue:
    """The queue of a model, for one worker; a `fair_queue.FairQueue` of the parent orders what all workers ask."""

    worker: GatewayWorker
    model: str
    slots: int
    batch_slots: int | None
    running: int = 0
    waiting: int = 0

    @property
    def background_slots(self) -> int:
        """Requests in the background that run at the same time."""
        return max(1, self.slots // 2) if self.batch_slots is None else self.batch_slots

    @property
    def loss_events(self) -> Mapping[str, int]:
        """Nothing: the parent counts them."""
        return {}

    def resize(self, slots: int) -> None:
        """Note the number of slots; the parent knows it from what it watches."""
        self.slots = slots

    @asynccontextmanager
    async def slot(
        self,
        tokens: int,
        tenant: str = "",
        *,
        wait_s: float = inf,
        arrived: float | None = None,
        background: bool = False,
        work: Work | None = None,
    ) -> AsyncIterator[None]:
        """See `fair_queue.FairQueue.slot`. The monotonic clock is the same in all processes."""
        self.waiting += 1
        counted = False
        try:
            async with self.worker.lease(
                model=self.model,
                tokens=tokens,
                tenant=tenant,
                wait_s=wait_s,
                arrived=arrived,
                background=background,
                work=None if work is None else asdict(work),
            ):
                self.waiting, self.running, counted = self.waiting - 1, self.running + 1, True
                yield
        finally:
            if counted:
                self.running -= 1
            else:
                self.waiting -= 1


@dataclass(slots=True)
class SharedReadiness:
    """Whether a model can be asked, as the parent finds out for all workers; see `readiness.Readiness`."""

    worker: GatewayWorker
    model: ServedModel
    key: str = field(init=False)
    fault: str | None = "it is not watched yet"
    _client: AsyncClient = field(init=False)
    _started: bool = False
    _suspended: str = ""
    _probed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._client = self.model.client
        # The same in all workers.
        self.key = " ".join((self.model.deployment, self._client.model_name, *self._client.urls))

    def start(self) -> None:
        """Have the servers watched, in the running event loop. Does nothing if that was done."""
        if self._started:
            return
        self._started = True
        for endpoint in self._client.endpoints:
            endpoint.ill = True
        self.worker.watch(
            self,
            model=self.model.name,
            urls=list(self._client.urls),
            entry=self._client.model_name,
            slots=self.model.queue.slots,
            slots_per_server=self.model.slots_per_server,
        )

    def hear(self, message: LinkMessage) -> None:
        """Take over the state of the servers from the parent."""
        self.fault = message["fault"]
        self._client.use_servers(message["servers"])
        for endpoint in self._client.endpoints:
            endpoint.ill = endpoint.url in message["ill"]
        self.model.queue.resize(message["slots"])
        if message["probed"]:
            self._probed.set()

    def suspect(self, url: str, reason: str) -> None:
        """See `readiness.Readiness.suspect`."""
        for endpoint in self._client.endpoints:
            endpoint.ill = endpoint.ill or endpoint.url == url
        self.worker.tell("suspect", key=self.key, url=url, reason=reason)

    def suspend(self, reason: str) -> None:
        """See `readiness.Readiness.suspend`."""
        if reason != self._suspended:
            self._suspended = reason
            self.worker.tell("suspend", key=self.key, reason=reason)

    async def probed(self) -> None:
        """Wait until each server has been probed for the first time."""
        await self._probed.wait()

    def take_over(self, replaced: SharedReadiness) -> None:
        """Tell the parent that this worker goes on with this model."""
        self.worker.tell("activate", key=self.key)
        replaced.stop()

    def stop(self) -> None:
        """Watch no more."""
        self.worker.unwatch(self)

    async def aclose(self) -> None:
        """Watch no more."""
        self.stop()

    def last_chunks(self) -> dict[str, float]:
        """Return the time of the last part of an answer from each server."""
        return {
            endpoint.url: endpoint.last_chunk_at
            for endpoint in self._client.endpoints
            if endpoint.last_chunk_at > -inf
        }


class _SharedHits(CacheHits):
    """Hits that the parent remembers: a report may come to another worker than the answer did."""

    def __init__(self, worker: GatewayWorker) -> None:
        super().__init__()
        self._worker = worker

    def remember(self, tenant: str, request_id: str, hit: CacheHit) -> None:
        self._worker.tell("remember", tenant=tenant, id=request_id, hit=hit)

    async def take(self, tenant: str, request_id: str) -> CacheHit | None:
        hit = await self._worker.ask("recall", tenant=tenant, id=request_id)
        return None if hit is None else CacheHit(*hit)
