"""A replica: an engine with in-flight batching and a KV cache that keeps computed prefixes.

Between two events all sequences that generate advance at the same pace, one token a step, so that nothing happens
step by step: a clock counts the steps, each sequence ends at a count that is known when it begins, and an event is
the end of a step with prompts, or of a sequence. As TensorRT-LLM's `guaranteed_no_evict` does, a request gets the
pages that it needs to its end before it begins, and prompts that wait share a step, as many tokens as fit.

Pages of a finished request stay until they are needed (least recently used first, the end of a
conversation before its beginning); the next question of the conversation then begins behind it, and any other one of
the same application behind the system prompt.

Not in it: pages in host memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from benchmarks.simulation.service import Service
from benchmarks.simulation.traffic import Conversation

State = Literal["starting", "ready", "draining", "lost", "gone"]
# A step counts as done when the clock is this close to its end: sums of floating-point numbers.
_NEARLY = 1e-6
# Steps after which the time of a step is worked out anew, because answers have become longer.
_MOST_STEPS = 128.0


class SimulatedRequest:
    """One question of a conversation, on its way.

    Attributes:
        conversation: Conversation of the question.
        turn: Number of the question, from 0.
        arrived_s: Time when it was asked.
        prompt: Tokens of the prompt.
        answer: Tokens that will be generated.
        queued_s: Seconds in the gateway before it was given to a replica.
        first_token_s: Time of the first token; None before.
        cached: Tokens of the prompt that did not have to be computed.
        blocks: Pages that it holds.
        tries: Replicas that it was given to.
    """

    __slots__ = (
        "answer", "arrived_s", "blocks", "cached", "conversation", "first_token_s", "prompt", "queued_s", "tries",
        "turn",
    )  # fmt: skip

    def __init__(self, conversation: Conversation, turn: int, arrived_s: float) -> None:
        self.conversation, self.turn, self.arrived_s = conversation, turn, arrived_s
        self.prompt = conversation.prompt(turn)
        self.answer = conversation.answers[turn]
        self.queued_s = 0.0
        self.first_token_s: float | None = None
        self.cached = self.blocks = self.tries = 0


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


class Replica:
    """One engine. Times are seconds of the simulation; call `advance` before anything else.

    Attributes:
        number: Number from 0, in the order in which replicas are started.
        service: Abilities of the replica.
        state: Only a `ready` one is given requests; a `draining` one ends when it is empty; a `lost` one does nothing,
            and nobody has noticed; a `gone` one is out of the fleet.
        is_open: Whether the gateway gives it requests.
        in_flight: Requests that it has, whether they wait for pages, for their prompt, or generate.
        used_blocks: Pages that its requests hold.
        due_s: Time of its next event; infinity: never by itself.
        version: Changes whenever `due_s` does.
    """

    def __init__(self, number: int, service: Service, now: float) -> None:
        self.number, self.service = number, service
        self.state: State = "starting"
        self.is_open = False
        self.in_flight = self.used_blocks = self.version = 0
        self.due_s = math.inf
        self.cache = PrefixCache()
        self._blocks, self._block_tokens = service.blocks, service.block_tokens
        # Requests that wait for pages.
        self._waiting: deque[SimulatedRequest] = deque()
        # Requests that wait for their prompts to be computed, with tokens left and tokens done.
        self._prompts: deque[tuple[SimulatedRequest, int, int]] = deque()
        # Requests that generate, and the step after which each ends; tokens that all of them have behind them.
        self._sequences: list[tuple[float, int, SimulatedRequest]] = []
        self._order = count()
        self._context = 0.0
        self._step, self._steps_per_s, self._at = 0.0, 0.0, now
        # The step with prompts that is under way: its end, and the requests whose prompts are done then.
        self._mixed_until = math.inf
        self._mixed_done: list[SimulatedRequest] = []

    @property
    def generating(self) -> int:
        """Sequences that generate."""
        return len(self._sequences)

    @property
    def kv_use(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return self.used_blocks / self._blocks

    def give(self, request: SimulatedRequest, now: float) -> None:
        """Hand a request over."""
        request.tries += 1
        self.in_flight += 1
        self._waiting.append(request)
        self._admit(now)

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Let time pass, at most to `due_s`.

        Returns:
            Requests whose answers have ended by then; they are out of it already.
        """
        steps = (now - self._at) * self._steps_per_s
        self._step += steps
        self._context += steps * len(self._sequences)
        self._at = now
        ended = []
        while self._sequences and self._sequences[0][0] <= self._step + _NEARLY:
            ended.append(self._finish(heappop(self._sequences)[2], generated=True))
        if now >= self._mixed_until:
            self._mixed_until = math.inf
            # Whole steps are over; what floating point has left of one is not.
            self._step = float(round(self._step))
            done, self._mixed_done = self._mixed_done, []
            for request in done:
                request.first_token_s = now
                if request.answer <= 1:
                    ended.append(self._finish(request, generated=False))
                else:
                    self._generate(request, request.answer - 1)
        return ended

    def plan(self, now: float) -> float:
        """Begin a step with prompts if some wait and none is under way, and work out the next event.

        Returns:
            Time of the next event: `due_s`.
        """
        self.version += 1
        sequences, ahead = len(self._sequences), 0.0
        if sequences:
            ahead = min(max(0.0, self._sequences[0][0] - self._step), _MOST_STEPS)
        if self._mixed_until == math.inf:
            if self._prompts:
                self._begin_mixed(now)
            elif sequences:
                halfway = self._context + sequences * ahead / 2
                self._steps_per_s = 1 / self.service.times.decode(sequences, halfway)
            else:
                self._steps_per_s = 0.0
        self.due_s = min(self._mixed_until, now + ahead / self._steps_per_s if sequences else math.inf)
        return self.due_s

    def halt(self) -> None:
        """Stop for good, with everything in it."""
        self.state = "lost"
        self._steps_per_s, self._mixed_until, self.due_s = 0.0, math.inf, math.inf
        self.version += 1

    def abandon(self) -> list[SimulatedRequest]:
        """Take all requests out of a replica that is lost, in the order in which they came."""
        partly = [request for request, _, _ in self._prompts]
        left = {*self._waiting, *partly, *self._mixed_done, *(request for _, _, request in self._sequences)}
        self.state, self.in_flight, self.used_blocks = "gone", 0, 0
        return sorted(left, key=lambda request: (request.arrived_s, request.conversation.number))

    def _admit(self, now: float) -> None:
        """Give pages to those who wait, in their order, as long as there are enough."""
        while self._waiting:
            request = self._waiting[0]
            tokens = request.prompt + math.ceil(request.answer)
            needed = min(-(-tokens // self._block_tokens), self._blocks)
            if self.used_blocks + needed > self._blocks:
                return
            self._waiting.popleft()
            conversation = request.conversation
            held = self.cache.take(conversation.number)
            shared = self.cache.use(-1 - conversation.application)
            found = max(held * self._block_tokens, min(shared * self._block_tokens, conversation.system))
            # The last token of a prompt is computed in any case.
            request.cached = max(0, min(found, request.prompt - 1))
            request.blocks = needed
            self.used_blocks += needed
            self.cache.shrink(self._blocks - self.used_blocks)
            if request.prompt:
                self._prompts.append((request, request.prompt - request.cached, request.cached))
            else:
                request.first_token_s = now
                self._generate(request, request.answer)

    def _begin_mixed(self, now: float) -> None:
        """Begin a step with as many tokens of the prompts that wait as fit into it."""
        times, sequences = self.service.times, len(self._sequences)
        room = max(1, self.service.step_tokens - sequences)
        tokens, read, pairs, begun = 0, 0.0, 0.0, False
        while self._prompts and tokens < room:
            request, left, done = self._prompts[0]
            piece = min(left, room - tokens)
            begun = begun or done == request.cached
            tokens, read, pairs = tokens + piece, read + done, pairs + piece * (done + piece / 2)
            if piece < left:
                self._prompts[0] = (request, left - piece, done + piece)
            else:
                self._prompts.popleft()
                self._mixed_done.append(request)
        seconds = times.mixed(sequences, self._context, tokens, read, pairs)
        if begun:
            seconds += times.prompt_s
        rest = wait_s = 0.0
        if sequences:
            # It begins when the step that is under way has ended.
            rest = max(0.0, math.ceil(self._step - _NEARLY) - self._step)
            wait_s = rest * times.decode(sequences, self._context)
        self._mixed_until = now + wait_s + seconds
        self._steps_per_s = (rest + 1) / (wait_s + seconds)

    def _generate(self, request: SimulatedRequest, tokens: float) -> None:
        heappush(self._sequences, (self._step + tokens, next(self._order), request))
        self._context += request.prompt

    def _finish(self, request: SimulatedRequest, *, generated: bool) -> SimulatedRequest:
        """Take a request out, keep its pages as a prompt's beginning, and let others in."""
        if generated:
            # The first token of a prompt's last step was not one of its sequence's own.
            own = request.answer - 1 if request.prompt else request.answer
            self._context = max(0.0, self._context - request.prompt - own) if self._sequences else 0.0
        self.in_flight -= 1
        self.used_blocks -= request.blocks
        conversation = request.conversation
        if conversation.system >= self._block_tokens:
            self.cache.put(-1 - conversation.application, conversation.system // self._block_tokens)
        self.cache.put(conversation.number, int(request.prompt + request.answer) // self._block_tokens)
        self.cache.shrink(self._blocks - self.used_blocks)
        self._admit(self._at)
        return request
