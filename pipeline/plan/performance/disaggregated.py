"""Prefill and decode apart: context servers compute prompts, generation servers take their KV caches and answer.

Each server is an engine of `scheduler`. Requests go to context servers in turns, and so do their KV caches to the
generation servers, where they wait for a slot: Dynamo's default router. A first token comes when its request has one,
as Dynamo and trtllm-serve send it. Not in it: pages that a context server keeps until they are fetched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, cycle

from pipeline.contracts.gpus import GpuRates
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.memory.tensors import cache_token_bytes
from pipeline.plan.performance.constants import Efficiency
from pipeline.plan.performance.scheduler import EngineRequest, EngineScheduler
from pipeline.plan.performance.served_engine import ServedEngine


@dataclass(frozen=True)
class DisaggregatedEngines:
    """Servers of both kinds, and what a KV cache takes from one to the other.

    Attributes:
        context: A context server.
        contexts: Context servers.
        generation: A generation server.
        generations: Generation servers.
        token_s: Seconds for the keys and values of a token of a prompt.
    """

    context: ServedEngine
    contexts: int
    generation: ServedEngine
    generations: int
    token_s: float = 0.0

    @property
    def slots(self) -> float:
        """Requests that it takes at a time: all, which wait at its servers."""
        return math.inf

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.contexts * self.context.gpus + self.generations * self.generation.gpus

    @property
    def progress(self) -> float:
        """Tokens that a step brings a sequence."""
        return self.generation.progress

    @property
    def request_s(self) -> float:
        """Seconds of a request outside the engines, whose front end is one."""
        return self.generation.request_s

    @property
    def admit_s(self) -> float:
        """Seconds from one request to the next, in which the front end hands them over."""
        return self.generation.admit_s

    def bundled(self, bundle: int) -> DisaggregatedEngines:
        """Let each request stand for several that are alike."""
        return replace(self, context=self.context.bundled(bundle), generation=self.generation.bundled(bundle))

    def scheduler(self) -> DisaggregatedScheduler:
        """Begin a simulation."""
        return DisaggregatedScheduler(self)


def transfer_s(
    context: ModelSpec, generation: ModelSpec, rates: GpuRates, efficiency: Efficiency, gpus: int
) -> float:
    """Compute the seconds in which the keys and values of a token of a prompt get from one server to the other.

    Each GPU of the server that has fewer sends or gets its share over its link: NVLink where it joins all `gpus` of the
    deployment, PCIe within a machine, else its network card.
    """
    ways = min(context.split.shared, generation.split.shared)
    held = sum(
        cache_token_bytes(replace(cache, is_bounded=False), context.kv_cache, ways)
        for block in context.sizes.blocks
        for cache in block.caches
        if not cache.state
    )
    return held / (rates.peer_gb_s(gpus) * 1e9 * efficiency.link)


class _Prompt(EngineRequest):
    """The part of a request that a context server has: its prompt, and one token."""

    __slots__ = ("whole",)

    def __init__(self, whole: EngineRequest, now: float) -> None:
        super().__init__(whole.prompt, 1, now)
        self.whole = whole


@dataclass
class _Generation:
    """A generation server, and requests that wait for its slots."""

    engine: EngineScheduler[EngineRequest]
    waiting: deque[EngineRequest] = field(default_factory=deque)


class DisaggregatedScheduler:
    """All servers, in the place of one `EngineScheduler`.

    Attributes:
        steps: Steps of the generation servers.
    """

    in_flight = 0  # of the slots that it has without end

    def __init__(self, service: DisaggregatedEngines) -> None:
        self._service = service
        self._contexts = [EngineScheduler[_Prompt](service.context) for _ in range(service.contexts)]
        self._generations = [
            _Generation(EngineScheduler(service.generation, record=True)) for _ in range(service.generations)
        ]
        self._next_context, self._next_generation = cycle(self._contexts), cycle(self._generations)
        # Times at which KV caches arrive.
        self._moving: list[tuple[float, int, EngineRequest]] = []
        self._order = count()

    @property
    def steps(self) -> Sequence[tuple[float, ...]]:
        return [step for generation in self._generations for step in generation.engine.steps or ()]

    def give(self, request: EngineRequest, now: float) -> None:
        """Hand a request over."""
        server = next(self._next_context)
        self._done(server, now)
        server.give(_Prompt(request, now), now)
        server.plan(now)

    def advance(self, now: float) -> list[EngineRequest]:
        """Let time pass, and return requests whose answers have ended."""
        ended: list[EngineRequest] = []
        for server in self._contexts:
            if server.due_s <= now:
                self._done(server, now)
                server.plan(now)
        for generation in self._generations:
            if generation.engine.due_s <= now:
                ended += generation.engine.advance(now)
                self._admit(generation, now)
        while self._moving and self._moving[0][0] <= now:
            request = heappop(self._moving)[2]
            if request.answer <= 1:
                request.first_token_s = now
                ended.append(request)
                continue
            generation = next(self._next_generation)
            generation.waiting.append(request)
            ended += generation.engine.advance(now)
            self._admit(generation, now)
        return ended

    def plan(self, now: float) -> float:
        """Return the time of the next event."""
        del now
        moving = self._moving[0][0] if self._moving else math.inf
        return min(
            moving,
            *(context.due_s for context in self._contexts),
            *(generation.engine.due_s for generation in self._generations),
        )

    def _done(self, server: EngineScheduler[_Prompt], now: float) -> None:
        """Send off the KV caches of prompts that a context server has computed."""
        for part in server.advance(now):
            part.whole.received = True
            arrives = now + self._service.token_s * part.prompt
            heappush(self._moving, (arrives, next(self._order), part.whole))

    def _admit(self, generation: _Generation, now: float) -> None:
        """Begin requests for which a generation server has slots."""
        while generation.waiting and generation.engine.in_flight < self._service.generation.slots:
            generation.engine.give(generation.waiting.popleft(), now)
        generation.engine.plan(now)
