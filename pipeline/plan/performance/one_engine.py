"""One engine under a load in a single loop: the simulation of `scheduler`, without objects and calls for each event.

A forecast simulates a hundred thousand requests. They get to the engine in the order in which they are asked, so that
most queues are positions in a list: requests before `coming` were handed over by the front end, those before `given`
are in the engine, those before `admitted` have pages. Results are those of `EngineScheduler`, to the last digit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pipeline.plan.performance.scheduler import MOST_STEPS, NEARLY
from pipeline.plan.performance.served_engine import ServedEngine

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of requests, in the order in which they were asked, and the steps of the engine."""

    asked_s: list[float]
    first_s: list[float]
    ended_s: list[float]
    steps: list[tuple[float, ...]]


def is_simple(service: ServedEngine) -> bool:
    """Whether `run_one` simulates an engine: prompts do not wait for those of other ranks."""
    return service.balance is None


def run_one(
    service: ServedEngine, lengths: Sequence[tuple[int, int]], starts: Sequence[float]
) -> RequestTimes:
    """Run requests through an engine: `starts` are the times of the first ones, others follow an answer's end.

    Args:
        lengths: Tokens of each prompt and of its answer, one at least of each.
    """
    times, slots, admit_s, most_blocks = service.times, service.slots, service.admit_s, service.blocks
    chunked, overlaps, ranks = service.chunked, service.overlaps, service.ranks
    rank_tokens, all_ranks = service.step_tokens // ranks, range(ranks)
    progress, width, prompt_s, seconds_of, decode = (
        times.progress, times.width, times.prompt_s, times.mixed, times.decode
    )  # fmt: skip
    total, page = len(lengths), service.block_tokens
    needed = [min(-(-(prompt + answer) // page), most_blocks) for prompt, answer in lengths]
    asked_s, first_s, ended_s, earliest = list(starts), [0.0] * total, [0.0] * total, [0.0] * total
    steps: list[tuple[float, ...]] = []
    asked, coming, given, admitted, queued = len(asked_s), 0, 0, 0, 0
    in_flight = used = begun_order = 0
    # By rank: requests whose prompts are to be computed, tokens done of the first, how many have pages, and generate.
    prompts, done = [deque[int]() for _ in all_ranks], [0] * ranks
    active, generating, rank_of = [0] * ranks, [0] * ranks, [0] * total
    # Sequences that generate, by the step after which each ends; tokens that all of them have behind them.
    sequences: list[tuple[float, int, int]] = []
    context, step, pace, at = 0.0, 0.0, 0.0, 0.0  # pace: steps a second
    # The step with prompts that is under way: its end, and the requests whose prompts are done then.
    mixed_until = mixed_ends = _NEVER
    mixed_done: list[int] = []
    due, free_s = _NEVER, 0.0
    handed = max(asked_s[0], free_s) + admit_s if asked else _NEVER

    def admit() -> None:
        """Give pages to those who wait, in their order, as long as there are enough."""
        nonlocal admitted, used, queued
        while admitted < given and used + needed[admitted] <= most_blocks:
            used += needed[admitted]
            rank = active.index(min(active)) if ranks > 1 else 0
            active[rank] += 1
            rank_of[admitted] = rank
            prompts[rank].append(admitted)
            admitted += 1
            queued += 1

    def finish(request: int) -> None:
        """Take a request out, and let others in."""
        nonlocal asked, in_flight, used
        ended_s[request] = at
        in_flight -= 1
        active[rank_of[request]] -= 1
        used -= needed[request]
        if asked < total:
            asked_s.append(at)
            asked += 1
        if admitted < given:
            admit()

    while True:
        now = handed if handed < due else due
        if now == _NEVER:
            return RequestTimes(asked_s, first_s, ended_s, steps)
        # Time passes.
        number, seconds = len(sequences), now - at
        if seconds:
            passed = seconds * pace
            made = passed * progress * number
            if mixed_until == _NEVER and seconds > 0:
                steps.append((seconds, passed, number, context + made / 2, 0, 0.0, 0.0, 0, 0))
            step += passed
            context += made
            at = now
        over = step + NEARLY
        while sequences and sequences[0][0] <= over:
            request = heappop(sequences)[2]
            prompt, answer = lengths[request]
            context = context - prompt - (answer - 1) if sequences else 0.0
            context = context if context > 0.0 else 0.0
            generating[rank_of[request]] -= 1
            finish(request)
        if now >= mixed_until:
            mixed_until = _NEVER
            # Whole steps are over; what floating point has left of one is not.
            step = float(round(step))
            ready, mixed_done = mixed_done, []
            for request in ready:
                first_s[request] = now
                prompt, answer = lengths[request]
                if answer > 1:
                    own = math.ceil((answer - 1) / progress - NEARLY) if progress > 1 else answer - 1
                    heappush(sequences, (step + own, begun_order, request))
                    begun_order += 1
                    generating[rank_of[request]] += 1
                    context += prompt
                else:
                    finish(request)
        # The front end hands requests over one by one, in the order in which they were asked.
        handed = _NEVER
        while coming < asked:
            arrived_s = asked_s[coming]
            handed = (arrived_s if arrived_s > free_s else free_s) + admit_s
            if handed > now:
                break
            free_s, handed = handed, _NEVER
            coming += 1
        number = len(sequences)
        while given < coming and in_flight < slots:
            in_flight += 1
            if overlaps and (number or mixed_until < _NEVER):
                # The step after the one that is under way has been scheduled.
                under_way = math.floor(step + NEARLY) + 1 if mixed_until == _NEVER else mixed_ends
                earliest[given] = under_way + 1
            given += 1
        if admitted < given:
            admit()
        # The next event.
        ahead = 0.0
        if number:
            ahead = sequences[0][0] - step
            ahead = 0.0 if ahead < 0.0 else MOST_STEPS if ahead > MOST_STEPS else ahead
        if mixed_until == _NEVER:
            held = _NEVER
            if queued:
                held = min([earliest[queue[0]] for queue in prompts if queue]) - step if number else 0.0
            if held <= NEARLY:
                # A step begins with as many tokens of the prompts that wait as fit into it.
                tokens, read, pairs, begun, longest, over = 0, 0.0, 0.0, False, 0, step + NEARLY
                for rank in all_ranks:
                    queue, own = prompts[rank], 0
                    room = rank_tokens - generating[rank] * width if queue else 0
                    room = room if room > 1 else 1
                    while queue and room > 0:
                        request, before = queue[0], done[rank]
                        if earliest[request] > over and (own or number or tokens):
                            break
                        piece = left = lengths[request][0] - before
                        if left > room:
                            if chunked:
                                piece = room
                            elif own:
                                break
                        room -= piece
                        own, read, pairs = own + piece, read + before, pairs + piece * (before + piece / 2)
                        begun = begun or not before
                        if piece < left:
                            done[rank] += piece
                        else:
                            done[rank] = 0
                            mixed_done.append(queue.popleft())
                            queued -= 1
                    tokens += own
                    longest = own if own > longest else longest
                seconds = seconds_of(number, context, tokens, read, pairs, longest)
                if begun:
                    seconds += prompt_s
                rest = wait_s = 0.0
                if number:
                    # It begins when the step that is under way has ended.
                    rest = math.ceil(step - NEARLY) - step
                    rest = rest if rest > 0.0 else 0.0
                    wait_s = rest * decode(number, context)
                    if wait_s:
                        steps.append((wait_s, rest, number, context, 0, 0.0, 0.0, 0, 0))
                mixed_until = now + wait_s + seconds
                mixed_ends = round(step + rest) + 1
                steps.append((seconds, 1.0, number, context, tokens, read, pairs, begun, longest))
                pace = (rest + 1) / (wait_s + seconds)
            elif number:
                ahead = held if held < ahead else ahead
                pace = 1 / decode(number, context + number * progress * ahead / 2)
            else:
                pace = 0.0
        due = mixed_until
        if number:
            ends = now + ahead / pace
            due = ends if ends < due else due
