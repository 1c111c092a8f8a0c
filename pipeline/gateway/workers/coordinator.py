"""Queues, probes and figures that the workers of a gateway have in common, in the event loop of their parent.

A place in a model's queue is leased to a worker until it says that it is free, or is gone. Servers are probed here,
once for all workers. While a package is exchanged some workers are at the old one and some at the new one: requests
then go on as long as both can be asked, and wait while either cannot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.cache.redis_server import RedisAddress
from pipeline.client import AsyncClient, ServerLost
from pipeline.gateway.background import Preempted
from pipeline.gateway.blame import Work
from pipeline.gateway.errors import ApiError
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.lost_servers import LostServers
from pipeline.gateway.readiness import GatewayStatus, ModelStatus, Readiness
from pipeline.gateway.records import CacheHit, CacheHits
from pipeline.gateway.redis_losses import RedisLosses
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.workers.link import LinkMessage, WorkerLink


class Coordinator:
    """Queues, probes and figures of all workers of a gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.restarts = 0  # of workers
        self._settings, redis = settings, settings.limits_redis
        # Losses of servers that are counted together with other gateways.
        self._losses = None if redis is None else RedisLosses(RedisAddress.parse(redis))
        self._workers: dict[int, _Member] = {}
        self._queues: dict[str, FairQueue] = {}
        self._watched: dict[str, _WatchedPackage] = {}
        self._hits = CacheHits()
        self._closing: set[asyncio.Task[None]] = set()

    def attach(self, number: int, link: WorkerLink) -> None:
        """Take a worker in; the messages of its link are handed to `receive`."""
        self._workers[number] = _Member(link)

    def detach(self, number: int) -> None:
        """Free all that a worker holds, which is gone."""
        member = self._workers.pop(number)
        for lease in member.leases.values():
            lease.task.cancel()
        for watched in list(self._watched.values()):
            self._leave(watched, number)

    def receive(self, number: int, message: LinkMessage) -> None:
        """Handle a message of a worker."""
        member, op = self._workers[number], message["op"]
        if op == "acquire":
            lease = message["lease"]
            entry = member.leases[lease] = _Lease(asyncio.get_running_loop().create_future())
            entry.task = asyncio.create_task(self._lease(member, message, entry.ended))
            entry.task.add_done_callback(lambda _: member.leases.pop(lease, None))
        elif op == "release":
            if (ended := member.leases.get(message["lease"])) is not None:
                ended.release(message)
        elif op == "listens":
            member.listens = True
        elif op == "report":
            self._note_report(member, message)
        elif op == "status":
            answer = self.status().as_json()
            member.link.send("answer", number=message["number"], value=answer)
        elif op == "remember":
            self._hits.remember(message["tenant"], message["id"], CacheHit(*message["hit"]))
        elif op == "recall":
            hit = self._hits.pop(message["tenant"], message["id"])
            member.link.send("answer", number=message["number"], value=hit)
        else:
            self._note_watching(number, member, message)

    def status(self) -> GatewayStatus:
        """Return the status of all workers together.

        While they are at different packages, the model counts as being at the one of the worker that changed the
        longest ago.
        """
        reported: dict[str, list[tuple[float, ModelStatus]]] = {}
        for member in self._workers.values():
            for name, status in member.models.items():
                reported.setdefault(name, []).append((member.since[name], status))
        models = {}
        for name, ranked in reported.items():
            statuses = [status for _, status in sorted(ranked, key=lambda pair: pair[0])]
            queue, merged = self._queues[name], statuses[0].merge(statuses[1:])
            models[name] = replace(
                merged,
                fault=self._fault(name),
                running=queue.running,
                waiting=queue.waiting,
                loss_events=queue.loss_events,
            )
        return GatewayStatus(models, sum(worker.listens for worker in self._workers.values()), self.restarts)

    def lost_servers(self, model: str) -> LostServers:
        """Return the blame for lost servers of a model."""
        return self._queues[model].lost_servers

    async def aclose(self) -> None:
        """Stop watching all servers."""
        for watched in list(self._watched.values()):
            self._end(watched)
        if self._closing:
            await asyncio.wait(self._closing)
        if self._losses is not None:
            await self._losses.aclose()

    async def _lease(self, member: _Member, wanted: LinkMessage, ended: asyncio.Future[None]) -> None:
        """Hold a place until `ended` says how the request ended, or this task is cancelled."""
        lease, work = wanted["lease"], wanted.get("work")
        try:
            async with self._queues[wanted["model"]].slot(
                wanted["tokens"],
                wanted["tenant"],
                wait_s=wanted["wait_s"],
                arrived=wanted["arrived"],
                background=wanted["background"],
                work=None if work is None else Work(**work),
            ):
                member.link.send("granted", lease=lease)
                await ended
        except ServerLost:
            # The queue knows by now.
            pass
        except Preempted:
            member.link.send("preempted", lease=lease)
        except ApiError as error:
            fields = {
                "status": error.status, "message": error.message, "code": error.code,
                "retry_after_s": error.retry_after_s,
            }  # fmt: skip
            member.link.send("refused", lease=lease, error=fields)

    def _note_report(self, member: _Member, report: LinkMessage) -> None:
        for name, fields in report["models"].items():
            status, before = ModelStatus(**fields), member.models.get(name)
            if before is None or (before.deployment, before.endpoints) != (
                status.deployment,
                status.endpoints,
            ):
                member.since[name] = time.monotonic()
            member.models[name] = status
        for key, chunks in report["chunks"].items():
            if (watched := self._watched.get(key)) is not None:
                watched.note_chunks(chunks)

    def _note_watching(self, number: int, member: _Member, message: LinkMessage) -> None:
        key = message["key"]
        if message["op"] == "watch":
            self._watch(number, member, message)
            return
        if (watched := self._watched.get(key)) is None:
            return
        match message["op"]:
            case "unwatch":
                self._leave(watched, number)
            case "activate":
                for other in self._watched.values():
                    if other.model == watched.model:
                        other.active.discard(number)
                watched.active.add(number)
                self._apply(watched.model)
            case "suspect":
                watched.readiness.suspect(message["url"], message["reason"])
            case "suspend":
                watched.suspensions[number] = message["reason"]
                watched.apply_suspensions()

    def _watch(self, number: int, member: _Member, message: LinkMessage) -> None:
        key, model = message["key"], message["model"]
        if model not in self._queues:
            queue = self._queues[model] = FairQueue(
                message["slots"],
                max_waiting=self._settings.max_waiting,
                background=self._settings.batch_slots,
            )
            queue.pause("it is not watched yet")
            if self._losses is not None:
                queue.lost_servers.share(self._losses)
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _WatchedPackage(self, key, model, message["slots"])
            client = AsyncClient(message["urls"], model=message["entry"])
            watched.begin(client, message["slots_per_server"])
        watched.holders[number] = member.link
        watched.tell(member.link)
        # The first package of a worker is not taken over from another package.
        if not any(number in watched.active for watched in self._watched.values() if watched.model == model):
            watched.active.add(number)
        self._apply(model)

    def _leave(self, watched: _WatchedPackage, number: int) -> None:
        if watched.holders.pop(number, None) is None:
            return
        watched.active.discard(number)
        if watched.suspensions.pop(number, ""):
            watched.apply_suspensions()
        if not watched.holders:
            self._end(watched)
        self._apply(watched.model)

    def _end(self, watched: _WatchedPackage) -> None:
        del self._watched[watched.key]
        closing = asyncio.create_task(watched.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _apply(self, model: str) -> None:
        """Pause the queue of a model unless every package that a worker is at can be asked."""
        queue, fault = self._queues[model], self._fault(model)
        if fault is not None:
            queue.pause(fault)
            return
        slots = min(watched.slots for watched in self._active(model))
        if slots != queue.slots:
            queue.resize(slots)
        queue.resume()

    def _active(self, model: str) -> list[_WatchedPackage]:
        """List the packages of a model that a worker is at."""
        return [watched for watched in self._watched.values() if watched.model == model and watched.active]

    def _fault(self, model: str) -> str | None:
        """Return the first fault of a package that a worker is at; None if the model can be asked."""
        if not (active := self._active(model)):
            return "no worker of the gateway serves it"
        return next((watched.fault for watched in active if watched.fault is not None), None)

    def note_change(self, watched: _WatchedPackage) -> None:
        """Tell the workers how servers are, and pause or resume the queue."""
        for link in watched.holders.values():
            watched.tell(link)
        self._apply(watched.model)


@dataclass(slots=True)
class _Lease:
    """A request of a worker that has a place in a queue, or waits for a place."""

    ended: asyncio.Future[None]
    task: asyncio.Task[None] = field(init=False)

    def release(self, message: LinkMessage) -> None:
        """End it as the request has ended: answered, by the loss of its server, or otherwise."""
        if url := message.get("lost"):
            error = ServerLost("lost by a worker")
            error.url = url
            self.ended.set_exception(error)
        elif message.get("answered"):
            self.ended.set_result(None)
        else:
            self.task.cancel()


@dataclass(slots=True)
class _Member:
    """A worker, as its parent knows it.

    Attributes:
        models: its last report.
        since: time at which it went over to the package that it is at, by model and by `time.monotonic()`.
    """

    link: WorkerLink
    listens: bool = False
    leases: dict[int, _Lease] = field(default_factory=dict)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)


class _WatchedPackage:
    """One package at some addresses, and the workers that know of it. To its `Readiness` it is the queue."""

    def __init__(self, coordinator: Coordinator, key: str, model: str, slots: int) -> None:
        self.key, self.model, self.slots = key, model, slots
        self.holders: dict[int, WorkerLink] = {}
        # Workers whose new requests go to it.
        self.active: set[int] = set()
        # Worker -> why it counts the model as not ready; empty if it does not.
        self.suspensions: dict[int, str] = {}
        self.fault: str | None = "it is not watched yet"
        self._coordinator, self._probed = coordinator, False
        self._servers: list[str] = []
        self._ill: list[str] = []
        self._waiting: asyncio.Task[None] | None = None

    def begin(self, client: AsyncClient, slots_per_server: int | None) -> None:
        """Watch the servers of a client."""
        self._client = client
        self.readiness = Readiness(self.model, client, self, slots_per_server=slots_per_server)
        self.readiness.start()
        self._waiting = asyncio.create_task(self._wait_for_probes())

    def resize(self, slots: int) -> None:
        """Called by its readiness, before `pause` or `resume`: so many servers can be asked."""
        self.slots = slots

    def pause(self, reason: str) -> None:
        """Called by its readiness: no server can be asked."""
        self._change(reason)

    def resume(self) -> None:
        """Called by its readiness: a server can be asked."""
        self._change(None)

    @property
    def lost_servers(self) -> LostServers:
        """Blame for lost servers of the model, whichever package they run."""
        return self._coordinator.lost_servers(self.model)

    def apply_suspensions(self) -> None:
        """Count the model as not ready while any worker does."""
        self.readiness.suspend(next(filter(None, self.suspensions.values()), ""))

    def note_chunks(self, chunks: Mapping[str, float]) -> None:
        """Take note of the last parts of answers that came from each server."""
        for endpoint in self._client.endpoints:
            endpoint.last_chunk_at = max(
                endpoint.last_chunk_at, chunks.get(endpoint.url, endpoint.last_chunk_at)
            )

    def tell(self, link: WorkerLink) -> None:
        """Tell a worker which servers there are, and how they are."""
        link.send(
            "readiness",
            key=self.key,
            fault=self.fault,
            servers=self._servers,
            ill=self._ill,
            slots=self.slots,
            probed=self._probed,
        )

    async def aclose(self) -> None:
        """Stop watching."""
        if self._waiting is not None:
            self._waiting.cancel()
        await self.readiness.aclose()
        await self._client.aclose()

    async def _wait_for_probes(self) -> None:
        await self.readiness.probed()
        self._probed = True
        self._coordinator.note_change(self)

    def _change(self, fault: str | None) -> None:
        servers = [endpoint.url for endpoint in self._client.endpoints]
        ill = [endpoint.url for endpoint in self._client.endpoints if endpoint.ill]
        if (fault, servers, ill) != (self.fault, self._servers, self._ill):
            self.fault, self._servers, self._ill = fault, servers, ill
            self._coordinator.note_change(self)
