"""The scheduler of an engine, simulated: in-flight batching under a budget of tokens, as TensorRT-LLM's does it.

Between two events all sequences that generate advance at the same pace, one step after the other, so that nothing
happens step by step: a clock counts the steps, each sequence ends at a count that is known when it begins, and an event
is the end of a step with prompts, or of a sequence. As `guaranteed_no_evict` does, a request gets the pages that it
needs to its end before it begins. Each step computes the next tokens of every sequence first, and then as much of the
prompts that wait as fits into the budget.

    scheduler = EngineScheduler(service); scheduler.give(request, now)
    due = scheduler.plan(now); ended = scheduler.advance(due)

`plan` runs one engine (`queueing`), `benchmarks/fleet.py` many of them behind a gateway. Not in it: pages in host
memory, and what network, gateway and Triton take.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from pipeline.plan.performance.step_times import StepTimes

# A step counts as done when the clock is this close to its end: sums of floating-point numbers.
_NEARLY = 1e-6
# Steps after which the time of a step is worked out anew, because answers have become longer.
_MOST_STEPS = 128.0


@dataclass(frozen=True, slots=True)
class PromptBalance:
    """Attention data parallelism with `attention_dp_config.enable_balance`: prompts wait until each rank has one.

    While all ranks generate, prompts are let in when each has one and some steps more have passed, or when a timer ends
    that begins again at each end and each time that prompts are let in (`_balance_adp_requests` in TensorRT-LLM 1.2).

    Attributes:
        ranks: Ranks that have requests of their own.
        timeout_steps: Steps of the timer, `timeout_iters`.
        wait_steps: Steps more when each rank has a prompt, `batching_wait_iters`.
    """

    ranks: int
    timeout_steps: int = 50
    wait_steps: int = 10


@dataclass(frozen=True)
class ServedEngine:
    """One replica of a deployment, as its scheduler sees it.

    Attributes:
        name: Name of the deployment.
        times: Times of its engine's steps.
        slots: Requests that it takes at a time.
        blocks: Pages of its KV cache.
        block_tokens: Tokens of a page.
        step_tokens: Most tokens of a step, of all ranks together.
        piece_tokens: Most tokens of a prompt in a step: those of one rank.
        chunked: Whether a prompt may be split over steps.
        overlaps: Whether a step is scheduled while the one before runs, so that a request that comes during a step
            begins with the next but one.
        balance: Wait for prompts of other ranks; None: prompts begin with the next step.
        max_prompt: Tokens of the longest prompt.
        gpus: GPUs of a replica.
        request_s: Seconds of a request outside the engine: HTTP, tokens, and their way back.
        admit_s: Seconds from one request to the next, in which a front end hands them over one by one.
        weight_bytes: Bytes of weights that it loads before it is ready.
        ttft_s: Target of the recipe's SLO, for the 95th percentile.
    """

    name: str
    times: StepTimes
    slots: int
    blocks: int
    block_tokens: int = 32
    step_tokens: int = 8192
    piece_tokens: float = math.inf
    chunked: bool = True
    overlaps: bool = False
    balance: PromptBalance | None = None
    max_prompt: int = 8192
    gpus: int = 1
    request_s: float = 0.0
    admit_s: float = 0.0
    weight_bytes: float = 0.0
    ttft_s: float = 1.0

    @property
    def progress(self) -> float:
        """Tokens that a step brings a sequence."""
        return self.times.progress

    def bundled(self, bundle: int) -> ServedEngine:
        """Let each request stand for several that are alike, and do everything together."""
        if bundle == 1:
            return self
        return replace(
            self,
            times=self.times.bundled(bundle),
            slots=max(1, self.slots // bundle),
            blocks=max(1, self.blocks // bundle),
            step_tokens=max(1, self.step_tokens // bundle),
            balance=self.balance and replace(self.balance, ranks=max(1, self.balance.ranks // bundle)),
            admit_s=self.admit_s * bundle,
        )

    def scheduler(self) -> EngineScheduler[EngineRequest]:
        """Begin a simulation whose steps are recorded."""
        return EngineScheduler(self, record=True)

    def prompt_s(self, tokens: int, cached: int = 0, sequences: int = 0, context: float = 0.0) -> float:
        """Seconds of a prompt that shares its steps with sequences that generate.

        Args:
            tokens: Tokens of the prompt.
            cached: Tokens of these that the KV cache has.
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
        """
        seconds, done = self.times.prompt_s, cached
        while done < tokens:
            room = min(self.step_tokens - sequences, self.piece_tokens)
            piece = int(min(tokens - done, room)) if self.chunked else tokens - done
            seconds += self.times.mixed(sequences, context, piece, done, piece * (done + piece / 2), piece)
            done += piece
        return seconds

    def requests_per_s(self, prompt: float, answer: float, cached: float = 0.0) -> float:
        """Requests a second of a replica whose slots are all taken all the time.

        Args:
            prompt: Mean tokens of a prompt.
            answer: Mean tokens of an answer.
            cached: Mean tokens of a prompt that the KV cache has.
        """
        context = self.slots * (prompt + answer / 2)
        steps = answer / self.times.progress * self.times.decode(self.slots, context) / self.slots
        beside = self.prompt_s(round(prompt), round(cached), self.slots, context)
        return 1 / (steps + beside - self.times.decode(self.slots, context))


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
    """

    __slots__ = ("answer", "arrived_s", "blocks", "cached", "earliest", "first_token_s", "prompt", "received")

    def __init__(self, prompt: int, answer: float, arrived_s: float) -> None:
        self.prompt, self.answer, self.arrived_s = prompt, answer, arrived_s
        self.first_token_s: float | None = None
        self.cached = self.blocks = 0
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
            prompts, whether some begin, tokens of the longest piece), where they are recorded.
    """

    def __init__(self, service: ServedEngine, now: float = 0.0, *, record: bool = False) -> None:
        self.service = service
        self.in_flight = self.used_blocks = 0
        self.due_s = math.inf
        self.steps: list[tuple[float, ...]] | None = [] if record else None
        self._blocks, self._block_tokens = service.blocks, service.block_tokens
        self._progress = service.times.progress
        # Requests that wait for pages.
        self._waiting: deque[R] = deque()
        # Requests that wait for their prompts to be computed, with tokens left and tokens done.
        self._prompts: deque[tuple[R, int, int]] = deque()
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
        sequences = self._sequences
        steps = (now - self._at) * self._steps_per_s
        if self.steps is not None and now > self._at and self._mixed_until == math.inf:
            context = self._context + steps * self._progress * len(sequences) / 2
            self.steps.append((now - self._at, steps, len(sequences), context, 0, 0.0, 0.0, 0, 0))
        self._step += steps
        self._context += steps * self._progress * len(sequences)
        self._at = now
        ended: list[R] = []
        while sequences and sequences[0][0] <= self._step + _NEARLY:
            ended.append(self._finish(heappop(sequences)[2], generated=True))
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
        sequences, ahead = len(self._sequences), 0.0
        if sequences:
            ahead = min(max(0.0, self._sequences[0][0] - self._step), _MOST_STEPS)
        if self._mixed_until == math.inf:
            held = self._held_steps() if self._prompts else 0.0
            if self._prompts and held <= _NEARLY:
                self._begin_mixed(now)
            elif sequences:
                ahead = min(ahead, held or ahead)
                halfway = self._context + sequences * self._progress * ahead / 2
                self._steps_per_s = 1 / self.service.times.decode(sequences, halfway)
            else:
                self._steps_per_s = 0.0
        self.due_s = min(self._mixed_until, now + ahead / self._steps_per_s if sequences else math.inf)
        return self.due_s

    def _held_steps(self) -> float:
        """Steps for which prompts still wait: until they are scheduled, or for those of other ranks."""
        balance = self.service.balance
        held = self._prompts[0][0].earliest - self._step if self._sequences else 0.0
        if held > _NEARLY or balance is None or len(self._sequences) < balance.ranks:
            return max(0.0, held)
        if len(self._prompts) < balance.ranks:
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
        partly = [request for request, _, _ in self._prompts]
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
            request.cached = max(0, min(self.reused(request), request.prompt - 1))
            request.blocks = needed
            self.used_blocks += needed
            self.admitted()
            if request.prompt and not request.received:
                self._prompts.append((request, request.prompt - request.cached, request.cached))
            else:
                request.first_token_s = now
                self._generate(request, request.answer - bool(request.prompt))

    def _begin_mixed(self, now: float) -> None:
        """Begin a step with as many tokens of the prompts that wait as fit into it."""
        self._timer, self._each_has_one = self._step, math.inf
        times, sequences, chunked = self.service.times, len(self._sequences), self.service.chunked
        room = max(1, self.service.step_tokens - sequences * times.width)
        partly: list[tuple[R, int, int]] = []
        tokens, read, pairs, begun, longest = 0, 0.0, 0.0, False, 0
        while self._prompts and tokens < room:
            request, left, done = self._prompts[0]
            if tokens and request.earliest > self._step + _NEARLY:
                break
            if not chunked and tokens and left > room - tokens:
                break
            piece = int(min(left, room - tokens, self.service.piece_tokens)) if chunked else left
            longest = max(longest, piece)
            begun = begun or done == request.cached
            tokens, read, pairs = tokens + piece, read + done, pairs + piece * (done + piece / 2)
            self._prompts.popleft()
            if piece < left:
                partly.append((request, left - piece, done + piece))
            else:
                self._mixed_done.append(request)
        self._prompts.extendleft(reversed(partly))
        seconds = times.mixed(sequences, self._context, tokens, read, pairs, longest)
        if begun:
            seconds += times.prompt_s
        rest = wait_s = 0.0
        if sequences:
            # It begins when the step that is under way has ended.
            rest = max(0.0, math.ceil(self._step - _NEARLY) - self._step)
            wait_s = rest * times.decode(sequences, self._context)
        self._mixed_until = now + wait_s + seconds
        self._mixed_ends = round(self._step + rest) + 1
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
        heappush(self._sequences, (ends, next(self._order), request))
        self._context += request.prompt

    def _finish(self, request: R, *, generated: bool) -> R:
        """Take a request out, and let others in."""
        if generated:
            # The first token of a prompt's last step was not one of its sequence's own.
            own = request.answer - 1 if request.prompt else request.answer
            self._context = max(0.0, self._context - request.prompt - own) if self._sequences else 0.0
        self.in_flight -= 1
        self.used_blocks -= request.blocks
        self.keep(request)
        self._admit(self._at)
        return request
