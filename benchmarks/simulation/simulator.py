"""A fleet of replicas behind a gateway, event by event: requests, scaling, and replicas that start, drain and are lost.

A request goes to a replica as long as one has a free slot, else it waits in the gateway, first come, first served,
and is refused (429) if the queue is full. Every 15 seconds the autoscaler looks at the metrics of the last
minute. A replica that is started takes requests when it has loaded its weights; one that is removed ends its requests.

When a node is lost, its replica stands still, and the gateway goes on giving it requests until that is noticed.
Requests without a first token are then asked again, in front of all that wait; answers that had begun are broken.

The same settings, conversations and routing give the same result.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from benchmarks.simulation.autoscaler import Autoscaler
from benchmarks.simulation.outcome import BROKEN, REFUSED, SERVED, FleetResult, FleetSettings
from benchmarks.simulation.replica import Replica, SimulatedRequest
from benchmarks.simulation.routing import Routing
from benchmarks.simulation.traffic import Conversation
from pipeline.bench.statistics import percentile

SYNC_S = 15.0  # --horizontal-pod-autoscaler-sync-period
METRIC_S = 60.0  # over which metrics are averaged

# Kinds of events; of those at one time, the first one here comes first.
_REPLICA, _LOST, _NOTICED, _READY, _REPLACED, _ASKED, _SYNC = range(7)


class Fleet:
    """A simulation, to be run once."""

    def __init__(
        self,
        settings: FleetSettings,
        conversations: Iterable[Conversation],
        length_s: float,
        routing: Routing,
    ) -> None:
        """
        Args:
            settings: Settings of the fleet.
            conversations: Conversations in the order of their begin.
            length_s: Time from which no question is asked.
            routing: Choice of the replica for a request.
        """
        self._settings, self._length_s, self._routing = settings, length_s, routing
        self._conversations = iter(conversations)
        self._autoscaler = Autoscaler(settings.rule) if settings.rule else None
        self._events: list[tuple[float, int, int, Any, int]] = []
        self._order = count()
        self._queue: deque[SimulatedRequest] = deque()
        self._replicas: list[Replica] = []
        # Replicas that the gateway knows, and their requests.
        self._open: list[Replica] = []
        self._in_flight = self._inside = self._to_ask = 0
        self._wanted = settings.replicas
        self._paid: dict[int, float] = {}
        self._replica_s = 0.0
        self._most_in_flight = 0
        # Nine numbers of each request that has left.
        self._rows = array("d")
        self._samples: list[tuple[float, int, int, int, int]] = []
        self._gauges: deque[tuple[float, float, float]] = deque(maxlen=round(METRIC_S / SYNC_S))
        self._queued: deque[tuple[float, float]] = deque()

    def run(self) -> FleetResult:
        """Run to the end of the last request."""
        for _ in range(self._settings.replicas):
            self._new_replica(0.0).state = "ready"
        self._open_changed(list(self._replicas))
        for loss in self._settings.losses:
            self._at(loss.at_s, _LOST, loss)
        self._at(0.0, _SYNC, None)
        self._begin_next_conversation()
        now = 0.0
        while self._events:
            now, kind, _, subject, version = heappop(self._events)
            if kind == _REPLICA:
                if subject.version != version:
                    continue
                self._bring_to(now, subject)
                self._plan(now, subject)
            elif kind == _ASKED:
                self._ask(now, *subject)
            else:
                self._manage(now, kind, subject)
            while self._queue and self._has_slot:
                self._dispatch(now, self._queue.popleft())
        assert self._inside == 0, "all requests have left"
        self._length_s = min(self._length_s, now)
        return self._result()

    def _manage(self, now: float, kind: int, subject: Any) -> None:
        """Handle an event of replicas."""
        if kind == _SYNC:
            self._sync(now)
        elif kind == _READY:
            if subject.state == "starting":
                subject.state = "ready"
                self._open_changed([*self._open, subject])
        elif kind == _LOST:
            # The busiest one: the most is lost there.
            running = [replica for replica in self._open if replica.state == "ready"]
            if running:
                victim = max(running, key=lambda replica: (replica.in_flight, -replica.number))
                self._bring_to(now, victim)
                victim.halt()
                self._stop_paying(now, victim)
                self._at(now + subject.noticed_s, _NOTICED, victim)
                self._at(now + subject.replaced_s, _REPLACED, None)
        elif kind == _NOTICED:
            self._notice(now, subject)
        elif kind == _REPLACED and len(self._alive) < self._wanted:
            self._start_replica(now)

    # Requests

    def _begin_next_conversation(self) -> None:
        for conversation in self._conversations:
            if conversation.prompt(0) <= self._settings.service.max_prompt:
                self._at(conversation.start_s, _ASKED, (conversation, 0))
                return

    def _ask(self, now: float, conversation: Conversation, turn: int) -> None:
        self._to_ask -= 1
        if turn == 0:
            self._begin_next_conversation()
        request = SimulatedRequest(conversation, turn, now)
        self._inside += 1
        if self._has_slot and not self._queue:
            self._dispatch(now, request)
            return
        limit = self._settings.queue_limit
        if limit is None or len(self._queue) < limit * max(1, len(self._open)):
            self._queue.append(request)
        else:
            self._leave(now, request, REFUSED)

    @property
    def _has_slot(self) -> bool:
        return self._in_flight < self._settings.service.slots * len(self._open)

    def _dispatch(self, now: float, request: SimulatedRequest) -> None:
        replica = self._routing.choose(request, self._in_flight)
        self._bring_to(now, replica)
        replica.give(request, now)
        request.queued_s = now - request.arrived_s
        if self._autoscaler is not None:
            self._queued.append((now, request.queued_s))
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, replica.in_flight)
        self._routing.load_changed(replica)
        self._plan(now, replica)

    def _bring_to(self, now: float, replica: Replica) -> None:
        """Let a replica work until now."""
        for request in replica.advance(now):
            if replica.is_open:
                self._in_flight -= 1
                self._routing.load_changed(replica)
            elif not replica.in_flight:
                self._remove(now, replica)
            self._leave(now, request, SERVED)

    def _plan(self, now: float, replica: Replica) -> None:
        if replica.state in ("ready", "draining") and (due := replica.plan(now)) < math.inf:
            heappush(self._events, (due, _REPLICA, next(self._order), replica, replica.version))

    def _leave(self, now: float, request: SimulatedRequest, outcome: int) -> None:
        """Record a request; the person who asked may ask the next question."""
        self._inside -= 1
        first = math.nan if request.first_token_s is None else request.first_token_s - request.arrived_s
        served = outcome == SERVED
        self._rows.extend(
            (
                request.arrived_s, outcome, first, now - request.arrived_s, request.queued_s, request.prompt,
                request.cached, request.answer if served else 0.0, request.tries,
            )
        )  # fmt: skip
        conversation, turn = request.conversation, request.turn + 1
        if not served:
            return
        if turn == len(conversation.questions):
            if conversation.then is not None:
                self._at(now, _ASKED, (conversation.then, 0))
            return
        asked_s = now + conversation.pauses_s[turn - 1]
        if asked_s < self._length_s and conversation.prompt(turn) <= self._settings.service.max_prompt:
            self._at(asked_s, _ASKED, (conversation, turn))

    # Replicas

    def _new_replica(self, now: float) -> Replica:
        replica = Replica(len(self._replicas), self._settings.service, now)
        self._replicas.append(replica)
        self._paid[replica.number] = now
        return replica

    def _start_replica(self, now: float) -> None:
        self._at(now + self._settings.start_s, _READY, self._new_replica(now))

    def _open_changed(self, replicas: list[Replica]) -> None:
        """Replace the replicas that the gateway knows; requests of others no longer count against slots."""
        self._open = replicas
        for replica in self._replicas:
            replica.is_open = False
        for replica in replicas:
            replica.is_open = True
        self._in_flight = sum(replica.in_flight for replica in replicas)
        self._routing.replicas_changed(replicas)

    def _notice(self, now: float, replica: Replica) -> None:
        if replica.is_open:
            self._open_changed([candidate for candidate in self._open if candidate is not replica])
        again = []
        for request in replica.abandon():
            if request.first_token_s is None:
                again.append(request)
            else:
                self._leave(now, request, BROKEN)
        self._queue.extendleft(reversed(again))

    @property
    def _alive(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.state in ("starting", "ready")]

    def _remove(self, now: float, replica: Replica) -> None:
        replica.state = "gone"
        self._stop_paying(now, replica)

    def _stop_paying(self, now: float, replica: Replica) -> None:
        if (since := self._paid.pop(replica.number, None)) is not None:
            self._replica_s += max(0.0, min(now, self._length_s) - since)

    def _sync(self, now: float) -> None:
        """Take a sample, and scale."""
        ready = [replica for replica in self._open if replica.state == "ready"]
        use = sum(replica.kv_use for replica in ready) / max(1, len(ready))
        self._gauges.append((self._inside, len(self._queue), use))
        if self._autoscaler is not None:
            values = self._metrics(now)
            wanted = self._autoscaler.decide(now, current=self._wanted, ready=len(ready), values=values)
            self._scale(now, wanted)
        self._samples.append((now, self._inside, len(self._queue), len(ready), self._wanted))
        if now + SYNC_S < self._length_s and (self._inside or self._to_ask):
            self._at(now + SYNC_S, _SYNC, None)

    def _metrics(self, now: float) -> dict[str, float]:
        """Metrics as queries of Prometheus return them, averaged over the last minute."""
        while self._queued and self._queued[0][0] < now - METRIC_S:
            self._queued.popleft()
        waits = [waited for _, waited in self._queued]
        requests, waiting, use = (sum(values) / len(values) for values in zip(*self._gauges, strict=True))
        return {
            "requests": requests,
            "waiting": waiting,
            "kv_use": use,
            # A quantile of no requests is not a number, which the manifests read as nobody waiting.
            "queue_time_s": percentile(waits, 95) if waits else 0.0,
        }

    def _scale(self, now: float, wanted: int) -> None:
        """Start replicas, or remove some: those that are not ready first, then the youngest."""
        for _ in range(wanted - self._wanted):
            self._start_replica(now)
        # Of a node that is lost, the pod is the first to go.
        surplus = max(0, len(self._alive) - wanted) if wanted < self._wanted else 0
        self._wanted = wanted
        youngest = sorted(self._alive, key=lambda replica: (replica.state != "starting", -replica.number))
        for replica in youngest[:surplus]:
            was_open = replica.is_open
            replica.state = "draining"
            if was_open:
                self._open_changed([candidate for candidate in self._open if candidate is not replica])
            if not replica.in_flight:
                self._remove(now, replica)

    def _at(self, when: float, kind: int, subject: Any) -> None:
        self._to_ask += kind == _ASKED
        heappush(self._events, (when, kind, next(self._order), subject, 0))

    def _result(self) -> FleetResult:
        for replica in self._replicas:
            self._stop_paying(self._length_s, replica)
        columns = np.array(self._rows).reshape(-1, 9).T
        arrived, outcome, ttft, total, queued, prompt, cached, answer, tries = columns
        return FleetResult(
            self._settings, self._length_s, arrived, outcome.astype(np.int8), ttft, total, queued, prompt, cached,
            answer, tries, np.array(self._samples, np.float64).reshape(-1, 5), self._replica_s, self._most_in_flight,
        )  # fmt: skip
