"""Whether a model can be asked: a real inference went through its entry model within the last seconds; and its status.

Each Triton server of a model is watched by itself. Tokens of real requests show that it is well; where none come, one
token is generated about once a second. A server is ill when that fails, or takes longer than a deadline while no other
token comes from there: a server whose slots are all taken by long answers is busy, not ill.

While all servers of a model are ill, its queue is paused: requests wait there, and go on when one is well again.
Triton's own readiness says too little for this: it stays at 200 when the process of a Python model is dead (24.10).

The status of models, for /readyz and the gauges, is that of one process, or of all workers of a gateway.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from pipeline.client import AsyncClient, Busy, ClientError, ConnectFailed, Retries, Timeouts
from pipeline.client.endpoints import Endpoint
from pipeline.gateway.lost_servers import LostServers

_log = logging.getLogger("pipeline.gateway")

# Seconds without a token until one is generated, and from one look to the next while a server is ill.
_INTERVAL_S, _INTERVAL_ILL_S = 1.0, 0.25
_POLL_S = 0.1
# For one token, while no other token comes from the same server.
_DEADLINE_S = 3.0
# A probe that takes so long is cancelled. Not sooner: a request that is cancelled just as it ends can stay in Triton
# 24.10 for good, and a probe that was held up ends by itself when the server goes on.
_ABANDON_S = 10.0
_NOT_PROBED = "no inference has gone through it yet"
PROBE_ID = "readiness-probe"


class Pausable(Protocol):
    """Queue of requests that wait while a model cannot be asked; a `fair_queue.FairQueue` is one."""

    @property
    def slots(self) -> int: ...
    @property
    def lost_servers(self) -> LostServers: ...
    def resize(self, slots: int) -> None: ...
    def pause(self, reason: str) -> None: ...
    def resume(self) -> None: ...


class ModelReadiness(Protocol):
    """Readiness of a model: `Readiness`, or a worker's copy of it (`workers.worker.SharedReadiness`)."""

    @property
    def fault(self) -> str | None: ...
    def start(self) -> None: ...
    def suspect(self, url: str, reason: str) -> None: ...
    def suspend(self, reason: str) -> None: ...
    async def probed(self) -> None: ...
    def take_over(self, replaced: Any) -> None:
        """See `Readiness.take_over`; `replaced` is of the same class."""

    async def aclose(self) -> None: ...


@dataclass(slots=True, eq=False)
class _WatchedServer:
    """One server.

    Attributes:
        fault: reason why it cannot be asked; empty if it can.
        suspected_at: time of the last loss of a request there, by `time.monotonic()`. A probe that began before does
            not show that the server is well again.
        wake: set to look at once.
        task: looks after it.
    """

    endpoint: Endpoint
    fault: str
    suspected_at: float = -math.inf
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Readiness:
    """Watches the servers of one model, which may come and go, from `start` to `aclose`."""

    def __init__(
        self, name: str, client: AsyncClient, queue: Pausable, *, slots_per_server: int | None = None
    ) -> None:
        """
        Args:
            client: sends the model's requests. Its endpoints are marked as ill while they are.
            queue: the model's; paused while all servers are ill.
            slots_per_server: requests that each server takes at once: the queue has so many for each that is well.
                None: it keeps those that it has.
        """
        self._name, self._client, self._slots_per_server = name, client, slots_per_server
        # None: stopped.
        self._queue: Pausable | None = queue
        self._suspended, self._started = "", False
        self._watched: list[_WatchedServer] = []
        # Those of servers that are gone, until they have ended, too.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def fault(self) -> str | None:
        """Why the model cannot be asked; None if it can."""
        if self._suspended or not self._started:
            return self._suspended or "it is not watched yet"
        if not self._watched:
            return f"no server of it is known: {self._client.fault}"
        faults = [f"{server.endpoint.url}: {server.fault}" for server in self._watched if server.fault]
        return "; ".join(faults) if len(faults) == len(self._watched) else None

    def start(self) -> None:
        """Begin to watch, in the running event loop. Does nothing if that was done."""
        if not self._started:
            self._started = True
            self._client.watch_servers(self._follow_servers)
            self._follow_servers()

    def _follow_servers(self) -> None:
        """Watch the servers that there are now. One that is new gets no request before its first probe."""
        if self._queue is None:
            return
        servers = self._client.endpoints
        for gone in [server for server in self._watched if server.endpoint not in servers]:
            self._watched.remove(gone)
            if gone.task is not None:
                gone.task.cancel()
        known = {server.endpoint.url for server in self._watched}
        for endpoint in servers:
            if endpoint.url not in known:
                endpoint.ill = True
                watched = _WatchedServer(endpoint, _NOT_PROBED)
                self._watched.append(watched)
                # Apart from the trace of the request that may have begun it.
                watched.task = asyncio.get_running_loop().create_task(self._watch(watched), context=Context())
                self._tasks.add(watched.task)
                watched.task.add_done_callback(self._tasks.discard)
        self._apply()

    def suspect(self, url: str, reason: str) -> None:
        """Count a server as ill because a request was lost there, until a probe shows that it is not.

        Args:
            url: host:port of the server.
            reason: description of the loss.
        """
        for server in self._watched:
            if server.endpoint.url == url:
                server.suspected_at = time.monotonic()
                self._set(server, reason)
                server.wake.set()

    def suspend(self, reason: str) -> None:
        """Count the model as not ready, whatever probes find.

        Args:
            reason: text such as "its server is being started again"; empty ends this.
        """
        if reason != self._suspended:
            self._suspended = reason
            self._apply()

    async def probed(self) -> None:
        """Wait until each server has been probed for the first time, and was found well or ill."""
        while any(server.fault == _NOT_PROBED for server in self._watched):
            await asyncio.sleep(_POLL_S)

    def take_over(self, replaced: Readiness) -> None:
        """Pause the queue of another model from now on, which this one replaces, and stop its readiness."""
        self._queue = replaced._queue
        replaced.stop()
        self._apply()

    def stop(self) -> None:
        """Stop watching. The queue stays as it is, and is not touched any more."""
        self._queue = None
        for task in tuple(self._tasks):
            task.cancel()

    async def aclose(self) -> None:
        """Stop watching, and wait for the end of what that had begun."""
        self.stop()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _watch(self, watched: _WatchedServer) -> None:
        endpoint = watched.endpoint
        # The deadline is kept below, so that a probe which is late is not cancelled at once.
        timeouts = Timeouts(connect_s=_DEADLINE_S, first_token_s=None, between_tokens_s=None)
        probes = AsyncClient(
            endpoint.url, model=self._client.model_name, timeouts=timeouts, retries=Retries(attempts=1)
        )
        async with probes:
            while True:
                watched.wake.clear()
                if watched.fault or time.monotonic() - endpoint.last_chunk_at >= _INTERVAL_S:
                    await self._probe(watched, probes)
                quiet_s = time.monotonic() - endpoint.last_chunk_at
                pause_s = _INTERVAL_S - quiet_s if quiet_s < _INTERVAL_S else _INTERVAL_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL_ILL_S if watched.fault else pause_s):
                        await watched.wake.wait()

    async def _probe(self, watched: _WatchedServer, client: AsyncClient) -> None:
        """Generate one token, and note what that says about the server."""
        began = time.monotonic()
        asking = asyncio.ensure_future(client.generate("Hello", max_tokens=1, request_id=PROBE_ID))
        try:
            while not asking.done() and (now := time.monotonic()) - began < _ABANDON_S:
                if now - max(began, watched.endpoint.last_chunk_at) >= _DEADLINE_S:
                    self._set(watched, f"no token within {_DEADLINE_S:g} s")
                await asyncio.wait([asking], timeout=_POLL_S)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait([asking])
        if asking.cancelled() or began < watched.suspected_at:
            return
        match asking.exception():
            case None:
                self._set(watched, "")
            case Busy():
                # It answers, and does not say whether it generates: nothing is known that was not known before.
                pass
            case ClientError() as error:
                if isinstance(error, ConnectFailed) and not watched.fault and self._queue is not None:
                    self._queue.lost_servers.server_gone(watched.endpoint.url)
                self._set(watched, str(error))
            case error:
                self._set(watched, f"{type(error).__name__}: {error}")

    def _set(self, watched: _WatchedServer, fault: str) -> None:
        if bool(fault) != bool(watched.fault) and watched.fault != _NOT_PROBED:
            state = f"cannot be asked: {fault}" if fault else "can be asked"
            _log.warning("%s: %s %s", self._name, watched.endpoint.url, state)
        watched.fault, watched.endpoint.ill = fault, bool(fault)
        if not fault and self._queue is not None:
            self._queue.lost_servers.server_well(watched.endpoint.url)
        self._apply()

    def _apply(self) -> None:
        """Pause the queue while the model cannot be asked, and give it the slots of the servers that can be."""
        queue = self._queue
        if queue is None:
            return
        well = sum(not server.fault for server in self._watched)
        if self._slots_per_server is not None and well and queue.slots != well * self._slots_per_server:
            queue.resize(well * self._slots_per_server)
        if (reason := self.fault) is None:
            queue.resume()
        else:
            queue.pause(reason)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at one moment.

    Attributes:
        deployment: digest of the package that new requests go to.
        endpoints: host:port of its servers.
        fault: reason why it cannot be asked; None if it can.
        stale: reason why it is not the package that its record names; it can be asked all the same.
        replaced_requests: requests under way with packages that it has replaced.
        running: choices that have a slot.
        waiting: choices that wait for a slot.
        stalled: choices that have begun, and had no chunk for long.
        loss_events: event -> how often it happened; see `fair_queue.FairQueue.loss_events`.
    """

    deployment: str
    endpoints: Sequence[str]
    fault: str | None = None
    stale: str | None = None
    replaced_requests: int = 0
    running: int = 0
    waiting: int = 0
    stalled: int = 0
    loss_events: Mapping[str, int] = field(default_factory=dict)

    def merge(self, others: Sequence[ModelStatus]) -> ModelStatus:
        """Add the status of the same model in other workers, whatever package they are at.

        Returns:
            This package and its endpoints, which count as the model's until all workers have gone over to others, and
            this fault and queue, which all workers share; with the sums of what each worker has of its own.
        """
        every = (self, *others)
        return replace(
            self,
            stale=next((status.stale for status in every if status.stale is not None), None),
            replaced_requests=sum(status.replaced_requests for status in every),
            stalled=sum(status.stalled for status in every),
        )


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """All models of a gateway, and its processes.

    Attributes:
        models: by name.
        workers: processes that serve it.
        worker_restarts: how often a worker was started again.
    """

    models: Mapping[str, ModelStatus] = field(default_factory=dict)
    workers: int = 1
    worker_restarts: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold, for `of_json`."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> GatewayStatus:
        """Read the values of `as_json`."""
        models = {name: ModelStatus(**status) for name, status in values["models"].items()}
        return cls(**{**values, "models": models})


def readiness_page(models: Mapping[str, ModelStatus], *, draining: bool) -> tuple[dict[str, Any], int]:
    """Write the answer of /readyz; `draining`: the gateway is stopping.

    Returns:
        The body, and its HTTP status: 200 if any model can be asked, else 503.
    """
    faults = {name: model.fault for name, model in models.items() if model.fault is not None}
    ready = len(faults) < len(models) and not draining
    if draining:
        faults["gateway"] = "draining"
    # These can be asked all the same.
    stale = {name: model.stale for name, model in models.items() if model.stale is not None}
    described = {
        name: {
            "deployment": model.deployment,
            "endpoints": list(model.endpoints),
            "replaced_requests": model.replaced_requests,
        }
        for name, model in models.items()
    }
    return {"ready": ready, "faults": stale | faults, "models": described}, 200 if ready else 503
