"""The scheduler of an engine, simulated: in-flight batching under a budget of tokens, as TensorRT-LLM's does it.

Between two events all sequences that generate advance at the same pace, one step after the other, so that nothing
happens step by step: a clock counts the steps, each sequence ends at a count that is known when it begins, and an event
is the end of a step with prompts, or of a sequence. As `guaranteed_no_evict` does, a request gets the pages that it
needs to its end before it begins. Each step computes the next tokens of every sequence first, and then as much of the
prompts that wait as fits into the budget. With attention data parallelism, each rank has requests, prompts and a budget
of its own.

    scheduler = EngineScheduler(service); scheduler.give(request, now)
    due = scheduler.plan(now); ended = scheduler.advance(due)

`plan` runs one engine (`queueing`), `benchmarks/fleet.py` many of them behind a gateway. Not in it: pages in host
memory, and what network, gateway and Triton take.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from pipeline.plan.performance.served_engine import ServedEngine

# A step counts as done when the clock is this close to its end: sums of floating-point numbers.
_NEARLY = 1e-6
_NEVER = math.inf
# Steps after which the time of a step is worked out anew, because answers have become longer.
_MOST_STEPS = 128.0


class EngineRequest:
    """A request on its way through an engine.

    Attributes:
        prompt: Tokens of the prompt.
        answer: Tokens that will be generated.
        arrived_s: Time when it was asked.
        first_token_s: Time of the first token; None before.
        cached: Tokens of the prompt that did not have to be computed.
        blocks: Pages that it holds.
        received: Whether another engine has computed the prompt and the first token.
        earliest: Step, of all that its engine has done, with which its prompt may begin.
        rank: Rank that computes it.
    """

    __slots__ = (
        "answer", "arrived_s", "blocks", "cached", "earliest", "first_token_s", "prompt", "rank", "received",
    )  # fmt: skip

    def __init__(self, prompt: int, answer: float, arrived_s: float) -> None:
        self.prompt, self.answer, self.arrived_s = prompt, answer, arrived_s
        self.first_token_s: float | None = None
        self.cached = self.blocks = self.rank = 0
        self.received, self.earliest = False, 0.0


R = TypeVar("R", bound=EngineRequest)


class EngineScheduler(Generic[R]):
    """One engine. Times are seconds of the simulation; call `advance` before anything else.

    Attributes:
        service: Abilities of the engine.
        in_flight: Requests that it has, whether they wait for pages, for their prompt, or generate.
        used_blocks: Pages that its requests hold.
        due_s: Time of its next event; infinity: never by itself.
        steps: Steps so far as (seconds, how many, sequences, context of all, tokens, read and pairs of
            prompts, whether some begin, tokens of the busiest rank's prompts), where they are recorded.
    """

    def __init__(self, service: ServedEngine, now: float = 0.0, *, record: bool = False) -> None:
        self.service = service
        self.in_flight = self.used_blocks = 0
        self.due_s = math.inf
        self.steps: list[tuple[float, ...]] | None = [] if record else None
        self._blocks, self._block_tokens = service.blocks, service.block_tokens
        self._progress, self._balance = service.times.progress, service.balance
        self._rank_tokens = service.step_tokens // service.ranks
        # Requests that wait for pages.
        self._waiting: deque[R] = deque()
        # By rank: requests that wait for their prompts to be computed, with tokens left and tokens done; how many have
        # pages; and how many generate.
        self._prompts: list[deque[tuple[R, int, int]]] = [deque() for _ in range(service.ranks)]
        self._active, self._generating = [0] * service.ranks, [0] * service.ranks
        # Requests that generate, and the step after which each ends; tokens that all of them have behind them.
        self._sequences: list[tuple[float, int, R]] = []
        self._order = count()
        self._context = 0.0
        self._step, self._steps_per_s, self._at = 0.0, 0.0, now
        # Steps at which the timer for prompts began, and at which each rank had one.
        self._timer, self._each_has_one = 0.0, math.inf
        # The step with prompts that is under way: its end, and the requests whose prompts are done then.
        self._mixed_until = self._mixed_ends = math.inf
        self._mixed_done: list[R] = []

    @property
    def generating(self) -> int:
        """Sequences that generate."""
        return len(self._sequences)

    @property
    def kv_use(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return self.used_blocks / self._blocks

    def give(self, request: R, now: float) -> None:
        """Hand a request over."""
        self.in_flight += 1
        if self.service.overlaps and (self._sequences or self._mixed_until < math.inf):
            # The step after the one that is under way has been scheduled.
            under_way = (
                math.floor(self._step + _NEARLY) + 1 if self._mixed_until == math.inf else self._mixed_ends
            )
            request.earliest = under_way + 1
        self._waiting.append(request)
        self._admit(now)

    def advance(self, now: float) -> list[R]:
        """Let time pass, at most to `due_s`.

        Returns:
            Requests whose answers have ended by then; they are out of it already.
        """
        sequences, seconds = self._sequences, now - self._at
        if seconds:
            number, context = len(sequences), self._context
            steps = seconds * self._steps_per_s
            tokens = steps * self._progress * number
            if self._mixed_until == _NEVER and self.steps is not None and seconds > 0:
                self.steps.append((seconds, steps, number, context + tokens / 2, 0, 0.0, 0.0, 0, 0))
            self._step += steps
            self._context = context + tokens
            self._at = now
        ended: list[R] = []
        over = self._step + _NEARLY
        while sequences and sequences[0][0] <= over:
            ended.append(self._finish(heappop(sequences)[2], generated=True))
        if now >= self._mixed_until:
            self._mixed_until = _NEVER
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
        # Comparisons in place of `min` and `max`: this runs at each event, some ten thousand times in a forecast.
        number, ahead = len(self._sequences), 0.0
        if number:
            ahead = self._sequences[0][0] - self._step
            ahead = 0.0 if ahead < 0.0 else _MOST_STEPS if ahead > _MOST_STEPS else ahead
        if self._mixed_until == _NEVER:
            waiting = any(self._prompts)
            held = self._held_steps() if waiting else 0.0
            if waiting and held <= _NEARLY:
                self._begin_mixed(now)
            elif number:
                ahead = held if held and held < ahead else ahead
                halfway = self._context + number * self._progress * ahead / 2
                self._steps_per_s = 1 / self.service.times.decode(number, halfway)
            else:
                self._steps_per_s = 0.0
        due = self._mixed_until
        if number:
            ends = now + ahead / self._steps_per_s
            due = ends if ends < due else due
        self.due_s = due
        return due

    def _held_steps(self) -> float:
        """Steps for which prompts still wait: until they are scheduled, or for those of other ranks."""
        balance, held = self._balance, 0.0
        if self._sequences:
            held = min([queue[0][0].earliest for queue in self._prompts if queue]) - self._step
        if balance is None or held > _NEARLY or not all(self._generating):
            return held if held > 0.0 else 0.0
        if not all(self._prompts):
            self._each_has_one = math.inf
            passed = (self._step - self._timer + _NEARLY) // balance.timeout_steps
            self._timer += max(0.0, passed) * balance.timeout_steps
            # A timer that ends just now lets prompts in.
            ends = (
                self._timer
                if passed and self._step - self._timer <= _NEARLY
                else self._timer + balance.timeout_steps
            )
        else:
            self._each_has_one = min(self._each_has_one, self._step)
            ends = self._each_has_one + balance.wait_steps
        return max(0.0, ends - self._step)

    def halt(self) -> None:
        """Stop for good, with everything in it."""
        self._steps_per_s, self._mixed_until, self.due_s = 0.0, math.inf, math.inf

    def left(self) -> list[R]:
        """List all requests in it, and forget them."""
        partly = [request for queue in self._prompts for request, _, _ in queue]
        left = [*self._waiting, *partly, *self._mixed_done, *(request for _, _, request in self._sequences)]
        self.in_flight = self.used_blocks = 0
        return left

    def reused(self, request: R) -> int:
        """Return the tokens of a prompt that the KV cache has, as its request begins: none here."""
        del request
        return 0

    def admitted(self) -> None:
        """Take note that a request has its pages."""

    def keep(self, request: R) -> None:
        """Take note that a request has ended, whose pages are free now."""

    def _admit(self, now: float) -> None:
        """Give pages to those who wait, in their order, as long as there are enough."""
        while self._waiting:
            request = self._waiting[0]
            tokens = request.prompt + math.ceil(request.answer)
            needed = min(-(-tokens // self._block_tokens), self._blocks)
            if self.used_blocks + needed > self._blocks:
                return
            self._waiting.popleft()
            # The last token of a prompt is computed in any case.
            reused = self.reused(request)
            request.cached = max(0, min(reused, request.prompt - 1)) if reused else 0
            request.blocks = needed
            self.used_blocks += needed
            request.rank = self._active.index(min(self._active)) if len(self._active) > 1 else 0
            self._active[request.rank] += 1
            self.admitted()
            if request.prompt and not request.received:
                left = request.prompt - request.cached
                self._prompts[request.rank].append((request, left, request.cached))
            else:
                request.first_token_s = now
                self._generate(request, request.answer - bool(request.prompt))

    def _begin_mixed(self, now: float) -> None:
        """Begin a step with as many tokens of the prompts that wait as fit into it."""
        step, sequences = self._step, len(self._sequences)
        self._timer, self._each_has_one = step, _NEVER
        times, chunked, over = self.service.times, self.service.chunked, step + _NEARLY
        tokens, read, pairs, begun, longest = 0, 0.0, 0.0, False, 0
        for rank, queue in enumerate(self._prompts):
            own, taken = 0, False
            room = self._rank_tokens - self._generating[rank] * times.width
            if room < 1:
                room = 1
            while queue and room > 0:
                request, left, done = queue[0]
                # Where nothing else is in the step, a prompt begins in any case.
                if request.earliest > over and (taken or sequences or tokens):
                    break
                piece = left
                if left > room:
                    if chunked:
                        piece = room
                    elif taken:
                        break
                taken = True
                room -= piece
                if piece < left:
                    queue[0] = request, left - piece, done + piece
                else:
                    queue.popleft()
                    self._mixed_done.append(request)
                own, read, pairs = own + piece, read + done, pairs + piece * (done + piece / 2)
                begun = begun or done == request.cached
            tokens += own
            longest = own if own > longest else longest
        seconds = times.mixed(sequences, self._context, tokens, read, pairs, longest)
        if begun:
            seconds += times.prompt_s
        rest = wait_s = 0.0
        if sequences:
            # It begins when the step that is under way has ended.
            rest = math.ceil(step - _NEARLY) - step
            rest = rest if rest > 0.0 else 0.0
            wait_s = rest * times.decode(sequences, self._context)
        self._mixed_until = now + wait_s + seconds
        self._mixed_ends = round(step + rest) + 1
        if self.steps is not None:
            if wait_s:
                self.steps.append((wait_s, rest, sequences, self._context, 0, 0.0, 0.0, 0, 0))
            self.steps.append((seconds, 1.0, sequences, self._context, tokens, read, pairs, begun, longest))
        self._steps_per_s = (rest + 1) / (wait_s + seconds)

    def _generate(self, request: R, tokens: float) -> None:
        ends = (
            self._step + math.ceil(tokens / self._progress - _NEARLY)
            if self._progress > 1
            else self._step + tokens
        )
        self._generating[request.rank] += 1
        heappush(self._sequences, (ends, next(self._order), request))
        self._context += request.prompt

    def _finish(self, request: R, *, generated: bool) -> R:
        """Take a request out, and let others in."""
        if generated:
            # The first token of a prompt's last step was not one of its sequence's own.
            own = request.answer - 1 if request.prompt else request.answer
            self._context = max(0.0, self._context - request.prompt - own) if self._sequences else 0.0
            self._generating[request.rank] -= 1
        self.in_flight -= 1
        self._active[request.rank] -= 1
        self.used_blocks -= request.blocks
        self.keep(request)
        if self._waiting:
            self._admit(self._at)
        return request
