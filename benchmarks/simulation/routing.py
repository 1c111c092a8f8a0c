"""Choice of the replica for a request: any, the least loaded, or the one that has seen how the prompt begins.

Affinity is that of the gateway (`pipeline.client.spreading`): consistent hashing with bounded loads. One gateway is
modelled, which sees all requests; several of them each see a part, and bound only that. None of the ways gives a
replica more requests than it has slots.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from benchmarks.simulation.replica import Replica, SimulatedRequest
from pipeline.client.spreading import LOAD_BOUND, LOAD_FLOOR, HashRing, load_bound

_TRIES = 8  # at a replica with a free slot, before all are looked at


class Routing(Protocol):
    """A way to choose replicas."""

    def replicas_changed(self, ready: Sequence[Replica]) -> None:
        """Take note of the replicas that may be chosen."""
        ...

    def load_changed(self, replica: Replica) -> None:
        """Take note that a replica has been given a request, or has ended one."""
        ...

    def choose(self, request: SimulatedRequest, in_flight: int) -> Replica:
        """Choose a replica that has a free slot; there is one.

        Args:
            request: Request to be given to it.
            in_flight: Requests of all replicas together.
        """
        ...


class RandomRouting:
    """Any replica with a free slot, as a Service of Kubernetes chooses, which does not look for slots."""

    def __init__(self, seed: int = 0) -> None:
        self._chance, self._ready = random.Random(seed), list[Replica]()

    def replicas_changed(self, ready: Sequence[Replica]) -> None:
        self._ready = list(ready)

    def load_changed(self, replica: Replica) -> None:
        """It does not matter."""

    def choose(self, request: SimulatedRequest, in_flight: int) -> Replica:
        del request, in_flight
        for _ in range(_TRIES):
            replica = self._chance.choice(self._ready)
            if replica.in_flight < replica.service.slots:
                return replica
        return self._chance.choice(
            [replica for replica in self._ready if replica.in_flight < replica.service.slots]
        )


class LeastLoadRouting:
    """The replica with the fewest requests; of several, the one whose number has not changed for the longest."""

    def __init__(self) -> None:
        self._order, self._ready = count(), list[Replica]()
        # Requests of each replica, and numbers that it had before.
        self._heap: list[tuple[int, int, Replica]] = []

    def replicas_changed(self, ready: Sequence[Replica]) -> None:
        self._ready = list(ready)
        self._rebuild()

    def load_changed(self, replica: Replica) -> None:
        if replica.is_open:
            heappush(self._heap, (replica.in_flight, next(self._order), replica))
            if len(self._heap) > 1000 + 16 * len(self._ready):
                self._rebuild()

    def choose(self, request: SimulatedRequest, in_flight: int) -> Replica:
        del request, in_flight
        while self._heap[0][0] != self._heap[0][2].in_flight or not self._heap[0][2].is_open:
            heappop(self._heap)
        return self._heap[0][2]

    def _rebuild(self) -> None:
        self._heap = [(replica.in_flight, next(self._order), replica) for replica in self._ready]
        heapify(self._heap)


class AffinityRouting:
    """The replica that a conversation belongs to on the ring, or the next one that is not too busy.

    Attributes:
        bound: Most requests of a replica, as a multiple of the mean (the `c` of the paper); infinity: only its slots.
        floor: Requests that a replica may always have.
    """

    def __init__(self, bound: float = LOAD_BOUND, floor: int = LOAD_FLOOR) -> None:
        self.bound, self.floor = bound, floor
        self._ready: list[Replica] = []
        self._ring = HashRing(())

    def replicas_changed(self, ready: Sequence[Replica]) -> None:
        self._ready = list(ready)
        self._ring = HashRing([str(replica.number) for replica in ready])

    def load_changed(self, replica: Replica) -> None:
        """It is looked up when it matters."""

    def choose(self, request: SimulatedRequest, in_flight: int) -> Replica:
        most = load_bound(in_flight + 1, len(self._ready), self.bound, self.floor)
        for at in self._ring.walk(request.conversation.key):
            replica = self._ready[at]
            if replica.in_flight < min(most, replica.service.slots):
                return replica
        raise AssertionError("no replica has a free slot")
