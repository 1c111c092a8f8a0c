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
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.float64]

# A step counts as done when the clock is this close to its end: sums of floating-point numbers.
_NEARLY = 1e-6
# Steps after which the time of a step is worked out anew, because answers have become longer.
_MOST_STEPS = 128.0
# Tokens of prompts are rounded up to this, so that the time of a step is computed once for each width.
_WIDTH = 32


class StepTimes:
    """Seconds of a step of an engine."""

    def __init__(
        self,
        work: Callable[[Any, Any], Any],
        *,
        read_s: float = 0.0,
        pair_s: float = 0.0,
        host: Callable[[Any], Any] = lambda _: 0.0,
        hides_host: bool = False,
        prompt_s: float = 0.0,
        progress: float = 1.0,
        width: int = 1,
    ) -> None:
        """
        Args:
            work: Seconds of all but attention, from the sequences that generate and the tokens of prompts; both may be
                arrays.
            read_s: Seconds for each token whose keys and values are read.
            pair_s: Seconds for each pair of a prompt's token with one before it.
            host: Seconds of the host for a step, from the sequences.
            hides_host: Whether the host works beside the step before, so that only what is longer shows.
            prompt_s: Seconds once for prompts that are begun together.
            progress: Tokens that a step brings each sequence; more than one where drafts are verified.
            width: Tokens of the budget that a sequence takes up in a step.
        """
        self._work, self._host = work, host
        # (sequences, tokens of prompts) -> seconds of the device and of the host.
        self._known: dict[tuple[int, int], tuple[float, float]] = {}
        self._read_s, self._pair_s = read_s, pair_s
        self._hides_host = hides_host
        self.prompt_s, self.progress, self.width = prompt_s, progress, width

    def bundled(self, bundle: int) -> StepTimes:
        """Make the times of an engine whose sequences and prompts each stand for several."""
        return StepTimes(
            lambda sequences, tokens: self._work(sequences * bundle, tokens * bundle),
            read_s=self._read_s * bundle,
            pair_s=self._pair_s * bundle,
            host=lambda sequences: self._host(sequences * bundle),
            hides_host=self._hides_host,
            prompt_s=self.prompt_s,
            progress=self.progress,
            width=self.width,
        )

    def several(self, steps: Steps) -> Steps:
        """Compute the seconds of many steps at once, from rows as `EngineScheduler.steps` has them."""
        _, _, sequences, context, tokens, read, pairs, begun = steps.T[:8]
        device_s = self._work(sequences, tokens) + self._read_s * (context + read) + self._pair_s * pairs
        host_s = self._host(sequences)
        seconds = np.maximum(device_s, host_s) if self._hides_host else device_s + host_s
        return np.asarray(seconds + begun * self.prompt_s)

    def decode(self, sequences: int, context: float) -> float:
        """Seconds of a step that only generates; `context` is the tokens that all of them together have behind them."""
        return self.mixed(sequences, context, 0, 0.0, 0.0)

    def mixed(self, sequences: int, context: float, tokens: int, read: float, pairs: float) -> float:
        """Seconds of a step with pieces of prompts.

        Args:
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
            tokens: Tokens of the prompts' pieces.
            read: Tokens of these prompts that came before the pieces.
            pairs: Pairs of a token of a piece with one before it.
        """
        key = sequences, -(-tokens // _WIDTH) * _WIDTH
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._work(*key), self._host(sequences)
        base, host_s = found
        device_s = base + self._read_s * (context + read) + self._pair_s * pairs
        return max(device_s, host_s) if self._hides_host else device_s + host_s


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
        chunked: Whether a prompt may be split over steps.
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
    chunked: bool = True
    max_prompt: int = 8192
    gpus: int = 1
    request_s: float = 0.0
    admit_s: float = 0.0
    weight_bytes: float = 0.0
    ttft_s: float = 1.0

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
            piece = min(tokens - done, self.step_tokens - sequences) if self.chunked else tokens - done
            seconds += self.times.mixed(sequences, context, piece, done, piece * (done + piece / 2))
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
    """

    __slots__ = ("answer", "arrived_s", "blocks", "cached", "first_token_s", "prompt")

    def __init__(self, prompt: int, answer: float, arrived_s: float) -> None:
        self.prompt, self.answer, self.arrived_s = prompt, answer, arrived_s
        self.first_token_s: float | None = None
        self.cached = self.blocks = 0


R = TypeVar("R", bound=EngineRequest)


class EngineScheduler(Generic[R]):
    """One engine. Times are seconds of the simulation; call `advance` before anything else.

    Attributes:
        service: Abilities of the engine.
        in_flight: Requests that it has, whether they wait for pages, for their prompt, or generate.
        used_blocks: Pages that its requests hold.
        due_s: Time of its next event; infinity: never by itself.
        steps: Steps so far as (seconds, how many, sequences, context of all, tokens, read and pairs of
            prompts, whether some begin), where they are recorded.
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
        # The step with prompts that is under way: its end, and the requests whose prompts are done then.
        self._mixed_until = math.inf
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
            self.steps.append((now - self._at, steps, len(sequences), context, 0, 0.0, 0.0, 0))
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
            if self._prompts:
                self._begin_mixed(now)
            elif sequences:
                halfway = self._context + sequences * self._progress * ahead / 2
                self._steps_per_s = 1 / self.service.times.decode(sequences, halfway)
            else:
                self._steps_per_s = 0.0
        self.due_s = min(self._mixed_until, now + ahead / self._steps_per_s if sequences else math.inf)
        return self.due_s

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
            if request.prompt:
                self._prompts.append((request, request.prompt - request.cached, request.cached))
            else:
                request.first_token_s = now
                self._generate(request, request.answer)

    def _begin_mixed(self, now: float) -> None:
        """Begin a step with as many tokens of the prompts that wait as fit into it."""
        times, sequences, chunked = self.service.times, len(self._sequences), self.service.chunked
        room = max(1, self.service.step_tokens - sequences * times.width)
        tokens, read, pairs, begun = 0, 0.0, 0.0, False
        while self._prompts and tokens < room:
            request, left, done = self._prompts[0]
            if not chunked and tokens and left > room - tokens:
                break
            piece = min(left, room - tokens) if chunked else left
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
        if self.steps is not None:
            if wait_s:
                self.steps.append((wait_s, rest, sequences, self._context, 0, 0.0, 0.0, 0))
            self.steps.append((seconds, 1.0, sequences, self._context, tokens, read, pairs, begun))
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
