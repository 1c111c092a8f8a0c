"""A replica: the scheduler of `pipeline plan` with a KV cache that keeps computed prefixes, in the life of a pod.

Pages of a finished request stay until they are needed (least recently used first, the end of a
conversation before its beginning); the next question of the conversation then begins behind it, and any other one of
the same application behind the system prompt.

Not in it: pages in host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from benchmarks.simulation.traffic import Conversation
from pipeline.plan.performance.scheduler import EngineRequest, EngineScheduler
from pipeline.plan.performance.served_engine import ServedEngine

State = Literal["starting", "ready", "draining", "lost", "gone"]


class SimulatedRequest(EngineRequest):
    """One question of a conversation, on its way.

    Attributes:
        conversation: Conversation of the question.
        turn: Number of the question, from 0.
        queued_s: Seconds in the gateway before it was given to a replica.
        tries: Replicas that it was given to.
    """

    __slots__ = ("conversation", "queued_s", "tries", "turn")

    def __init__(self, conversation: Conversation, turn: int, arrived_s: float) -> None:
        super().__init__(conversation.prompt(turn), conversation.answers[turn], arrived_s)
        self.conversation, self.turn = conversation, turn
        self.queued_s, self.tries = 0.0, 0


class PrefixCache:
    """Pages of prompts' beginnings that no request uses, by conversation or (negative) application."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, int] = OrderedDict()
        self.blocks = 0

    def take(self, key: int) -> int:
        """Give the pages of a key to a request, which holds them itself from now on, and return their number."""
        blocks = self._held.pop(key, 0)
        self.blocks -= blocks
        return blocks

    def use(self, key: int) -> int:
        """Return how many pages a key has, and count it as used."""
        blocks = self._held.get(key, 0)
        if blocks:
            self._held.move_to_end(key)
        return blocks

    def put(self, key: int, blocks: int) -> None:
        """Keep pages of a key, in place of those it has."""
        self.blocks += blocks - self._held.get(key, 0)
        self._held[key] = blocks
        self._held.move_to_end(key)

    def shrink(self, most: int) -> None:
        """Drop the least recently used pages, until at most so many are left."""
        while self.blocks > most:
            key, blocks = next(iter(self._held.items()))
            kept = max(0, blocks - (self.blocks - most))
            self.blocks -= blocks - kept
            if kept:
                self._held[key] = kept
            else:
                del self._held[key]


class Replica(EngineScheduler[SimulatedRequest]):
    """One engine in a fleet. Times are seconds of the simulation; call `advance` before anything else.

    Attributes:
        number: Number from 0, in the order in which replicas are started.
        state: Only a `ready` one is given requests; a `draining` one ends when it is empty; a `lost` one does nothing,
            and nobody has noticed; a `gone` one is out of the fleet.
        is_open: Whether the gateway gives it requests.
        version: Changes whenever `due_s` does.
    """

    def __init__(self, number: int, service: ServedEngine, now: float) -> None:
        super().__init__(service, now)
        self.number = number
        self.state: State = "starting"
        self.is_open = False
        self.version = 0
        self.cache = PrefixCache()

    def give(self, request: SimulatedRequest, now: float) -> None:
        """Hand a request over."""
        request.tries += 1
        super().give(request, now)

    def plan(self, now: float) -> float:
        """Work out the next event, see `EngineScheduler.plan`."""
        self.version += 1
        return super().plan(now)

    def halt(self) -> None:
        """Stop for good, with everything in it."""
        self.state = "lost"
        self.version += 1
        super().halt()

    def abandon(self) -> list[SimulatedRequest]:
        """Take all requests out of a replica that is lost, in the order in which they came."""
        self.state = "gone"
        return sorted(self.left(), key=lambda request: (request.arrived_s, request.conversation.number))

    def reused(self, request: SimulatedRequest) -> int:
        """Take the pages of the conversation, and use those of its application."""
        conversation = request.conversation
        held = self.cache.take(conversation.number)
        shared = self.cache.use(-1 - conversation.application)
        return max(held * self._block_tokens, min(shared * self._block_tokens, conversation.system))

    def admitted(self) -> None:
        """Drop pages that requests need."""
        self.cache.shrink(self._blocks - self.used_blocks)

    def keep(self, request: SimulatedRequest) -> None:
        """Keep the pages of a request as a prompt's beginning."""
        conversation = request.conversation
        if conversation.system >= self._block_tokens:
            self.cache.put(-1 - conversation.application, conversation.system // self._block_tokens)
        self.cache.put(conversation.number, int(request.prompt + request.answer) // self._block_tokens)
        self.cache.shrink(self._blocks - self.used_blocks)
