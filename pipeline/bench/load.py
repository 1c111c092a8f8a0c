"""Puts one load on a target, and records every request.

    records = await run_load(target, load, conversations, period)

Times are counted from when a request was due. In a closed loop that is when it was sent. In an open loop it is the
scheduled time: a request that is sent late, because the generator was held up, was late for whoever waited for it
(otherwise "coordinated omission" hides the worst of a slow server).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.bench.load_settings import Load, TokensBy
from pipeline.bench.targets import BenchReply, BenchRequest, Outcome, Target
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.client import Message, Sampling, Stats

_LOOK_S = 0.05  # between two looks at how late this process is
_PAUSE_S = 0.1  # of a client of a closed loop whose request failed: it does not try as fast as it can
_CHUNKS = 16  # of an answer whose length is not known, until one has come

Gaps = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RequestMeasurement:
    """One request. Times are seconds since the load began.

    Attributes:
        due_s: Time when it was to be sent.
        sent_s: Time when it was sent.
        ended_s: Time of its last chunk, or of its failure.
        outcome: How it ended; `abandoned` where it had no end within the grace.
        stats: The client's measurements from `sent_s`, without the gaps.
        itl_ms: Gaps between chunks, in milliseconds, [chunks - 1]. An array, for there may be millions of them.
        turn: Place in its conversation, from 0.
        error: Why it was refused or failed.
        asked_tokens: Tokens that the answer had to have; None where the model decides.
        text: Text of an answer whose tokens the server did not count, until they are counted here.
        tokens_by: Source of its token count; `chunks` if there is no count.
    """

    due_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome | Literal["abandoned"]
    stats: Stats
    itl_ms: Gaps
    turn: int = 0
    error: str = ""
    asked_tokens: int | None = None
    text: str = ""
    tokens_by: TokensBy = "server"

    @property
    def short(self) -> bool:
        """Whether the answer has fewer tokens than it had to have."""
        had, asked = self.stats.output_tokens, self.asked_tokens
        return self.outcome == "complete" and had is not None and asked is not None and had < asked

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from when it was due."""
        return None if self.stats.ttft_ms is None else self.stats.ttft_ms + (self.sent_s - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first chunk."""
        tokens = self.stats.output_tokens
        return float(self.itl_ms.sum()) / (tokens - 1) if tokens and tokens > 1 and len(self.itl_ms) else None

    @property
    def total_ms(self) -> float | None:
        """Time to the end of the answer, from when it was due."""
        return None if self.stats.total_ms is None else self.stats.total_ms + (self.sent_s - self.due_s) * 1e3

    @property
    def first_s(self) -> float | None:
        """Time of its first chunk."""
        return None if self.stats.ttft_ms is None else self.sent_s + self.stats.ttft_ms / 1e3


@dataclass(frozen=True, slots=True)
class Period:
    """Length of a load: a number of requests or of seconds, whichever ends first.

    Attributes:
        seconds: Seconds in which requests begin, the warm-up not counted; None for no bound.
        requests: Requests that are begun, those of the warm-up not counted; None for no bound.
        warm_up_s: Seconds at the start whose requests are not counted.
        grace_s: With `seconds`: how long to wait for answers after them. Without, every answer is waited for.
        warm_up_requests: Requests at the start that are not counted, either.
    """

    seconds: float | None
    requests: int | None
    warm_up_s: float = 0.0
    grace_s: float = 60.0
    warm_up_requests: int = 0

    @property
    def ends_s(self) -> float | None:
        """Time after which no more requests begin; None for no bound."""
        return None if self.seconds is None else self.seconds + self.warm_up_s


@dataclass(slots=True)
class LoadRecords:
    """Requests of one load, and how the generator itself did.

    Attributes:
        counted: Requests that were due after the warm-up, in the order of their ends.
        warm_up: Requests before that.
        began_s: End of the warm-up, in seconds since the load began.
        ended_s: End of the period; with a number of requests, or where prompts came to an end, of the last answer.
        late_ms: How late this process was whenever it looked at its clock, in milliseconds.
        cpu_share: Share of one processor that the sending and reading thread used.
        in_flight: Most requests at a time.
        flying: Requests under way now.
        interrupted: Whether it was ended before its period was over; requests under way then are not recorded.
    """

    load: Load
    counted: list[RequestMeasurement] = field(default_factory=list)
    warm_up: list[RequestMeasurement] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    late_ms: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    in_flight: int = 0
    flying: int = 0
    interrupted: bool = False

    def count_tokens(self, count: Callable[[str], int]) -> None:
        """Count the tokens of answers whose server did not."""
        for kept in (self.counted, self.warm_up):
            for place, request in enumerate(kept):
                if request.text:
                    stats = replace(request.stats, output_tokens=count(request.text))
                    kept[place] = replace(request, stats=stats, text="", tokens_by="tokenizer")


async def run_load(
    target: Target,
    load: Load,
    conversations: Iterator[ScriptedConversation],
    period: Period,
    *,
    sampling: Sampling,
    seed: int,
    think_s: float = 0.0,
    watch: Callable[[LoadRecords, float], None] | None = None,
    stop: asyncio.Event | None = None,
) -> LoadRecords:
    """Put a load on a target until its period is over, and wait for the answers.

    Args:
        load: Conversations at a time, or how often they begin.
        conversations: Conversations to have; where they end, the load ends.
        period: Length of the load.
        think_s: Seconds between an answer and the next question of its conversation.
        watch: Called whenever this process looks at its clock, with the records so far and the seconds since the start.
        stop: Ends the load early when set; requests under way are cancelled.
    """
    run = _Run(target, load, conversations, period, sampling, think_s)
    used = time.thread_time()
    watching = asyncio.create_task(run.look(watch))
    try:
        await run.last(seed, stop or asyncio.Event())
    except BaseExceptionGroup as group:
        # Outcomes of requests are no exceptions: this is a fault of this program, or of its arguments.
        raise _first(group) from group
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    run.records.ended_s = run.ended_s()
    run.records.cpu_share = (time.thread_time() - used) / max(run.now_s(), 1e-9)
    return run.records


class _Run:
    """One load while it lasts."""

    def __init__(
        self,
        target: Target,
        load: Load,
        conversations: Iterator[ScriptedConversation],
        period: Period,
        sampling: Sampling,
        think_s: float,
    ) -> None:
        self._target, self._load, self._conversations, self._period = target, load, conversations, period
        self._sampling, self._think_s = sampling, think_s
        self.records = LoadRecords(load, began_s=period.warm_up_s)
        self._tasks = set[asyncio.Task[object]]()
        # Requests that were begun or are scheduled, without those of the warm-up.
        self._begun = 0
        self._warm_up_left = period.warm_up_requests
        self._ended_early = False
        self._typical_chunks = _CHUNKS
        self._start = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start

    def ended_s(self) -> float:
        ends_s = self._period.ends_s
        if self.records.interrupted:
            return self.now_s()
        if ends_s is not None and not self._ended_early:
            return ends_s
        return max((request.ended_s for request in self.records.counted), default=self.now_s())

    async def last(self, seed: int, stop: asyncio.Event) -> None:
        """Send requests and await their answers; cancel the rest after the grace period, or when `stop` is set."""
        async with asyncio.TaskGroup() as all_:
            ending = all_.create_task(self._end(stop))
            async with asyncio.TaskGroup() as group:
                if self._load.open:
                    self._add(group, self._open_loop(group, seed))
                else:
                    for _ in range(self._load.concurrency):
                        self._add(group, self._keep_one())
            ending.cancel()

    def _add(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, object]) -> None:
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, stop: asyncio.Event) -> None:
        ends_s = self._period.ends_s
        left_s = None if ends_s is None else max(0.0, ends_s + self._period.grace_s - self.now_s())
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), left_s)
        self.records.interrupted = stop.is_set()
        for task in tuple(self._tasks):
            task.cancel()

    async def _keep_one(self) -> None:
        while not self._over(self.now_s()) and (conversation := self._next()) is not None:
            if not await self._converse(conversation, None, self._begin(self.now_s())):
                await asyncio.sleep(_PAUSE_S)

    async def _open_loop(self, group: asyncio.TaskGroup, seed: int) -> None:
        arrivals = poisson(self._load.value, seed)
        while (conversation := self._next()) is not None:
            start_s = (conversation.start_s or 0.0) / self._load.value
            due_s = start_s if self._load.kind == "trace" else next(arrivals)
            if self._over(due_s):
                break
            # One that is late lets answers be read, too: however late all are, it ends.
            await asyncio.sleep(max(0.0, due_s - self.now_s()))
            self._add(group, self._converse(conversation, due_s, self._begin(due_s)))

    def _next(self) -> ScriptedConversation | None:
        conversation = next(self._conversations, None)
        self._ended_early |= conversation is None
        return conversation

    def _over(self, at_s: float) -> bool:
        """Whether a request that is due at this time is no longer sent."""
        if self._period.requests is not None and self._begun >= self._period.requests:
            self._ended_early = True
            return True
        return self._period.ends_s is not None and at_s >= self._period.ends_s

    def _begin(self, due_s: float) -> bool:
        """Count a request; return whether it counts, or belongs to the warm-up."""
        counts = due_s >= self._period.warm_up_s and not self._warm_up_left
        self._warm_up_left = max(0, self._warm_up_left - 1)
        if counts and not self._begun and self._period.warm_up_requests:
            self.records.began_s = due_s
        self._begun += counts
        return counts

    async def _converse(self, conversation: ScriptedConversation, due_s: float | None, counts: bool) -> bool:
        """Ask the questions of a conversation; return whether none failed.

        Args:
            due_s: Time when the first question was to be sent; None: now, and the others when their time has come.
            counts: Whether the first question counts.
        """
        before: tuple[Message, ...] = conversation.before
        for number, turn in enumerate(conversation.turns):
            prompt = (*before, {"role": "user", "content": turn.text}) if conversation.chat else turn.text
            reply = await self._ask(prompt, turn, conversation.leaves_at, due_s, number, counts)
            if reply.outcome != "complete" or number + 1 == len(conversation.turns):
                break
            answer: Message = {"role": "assistant", "content": reply.text}
            before = (*before, {"role": "user", "content": turn.text}, answer)
            next_s = self.now_s() + self._think_s
            due_s = None if due_s is None else next_s
            if self._think_s:
                await asyncio.sleep(self._think_s)
            if self._over(next_s):
                break
            counts = self._begin(next_s)
        return reply.outcome in ("complete", "left")

    async def _ask(
        self,
        prompt: str | Sequence[Message],
        turn: Turn,
        leaves_at: float | None,
        due_s: float | None,
        number: int,
        counts: bool,
    ) -> BenchReply:
        sampling: Sampling = {**self._sampling}
        if turn.max_tokens is not None:
            sampling["max_tokens"] = turn.max_tokens
            if turn.exact:
                sampling["min_tokens"] = turn.max_tokens
        leaves_after = None
        if leaves_at is not None:
            leaves_after = max(1, round(leaves_at * (turn.max_tokens or self._typical_chunks)))
        kept = self.records.counted if counts else self.records.warm_up
        asked_s = self.now_s()
        self.records.flying += 1
        self.records.in_flight = max(self.records.in_flight, self.records.flying)
        try:
            reply = await self._target.ask(BenchRequest(prompt, sampling, leaves_after))
        except asyncio.CancelledError:
            if not self.records.interrupted:
                due_s = asked_s if due_s is None else due_s
                kept.append(
                    RequestMeasurement(
                        due_s, asked_s, self.now_s(), "abandoned", Stats(), np.empty(0, np.float32), number
                    )
                )
            raise
        finally:
            self.records.flying -= 1
        stats, ended_s = reply.stats, self.now_s()
        # Work of this process before sending, such as rendering a template, is no waiting in a closed loop. In an open
        # one it is: everything from `due_s` is counted.
        sent_s = asked_s if reply.sent_at is None else reply.sent_at - self._start
        if reply.outcome == "complete":
            self._typical_chunks = stats.chunks
        kept.append(
            RequestMeasurement(
                due_s=sent_s if due_s is None else due_s,
                sent_s=sent_s,
                ended_s=ended_s,
                outcome=reply.outcome,
                stats=replace(stats, itl_ms=()),
                itl_ms=np.asarray(stats.itl_ms, np.float32),
                turn=number,
                error=reply.error,
                asked_tokens=turn.max_tokens if turn.exact else None,
                text=reply.text if stats.output_tokens is None else "",
                tokens_by="chunks" if stats.output_tokens is None else "server",
            )
        )
        return reply

    async def look(self, watch: Callable[[LoadRecords, float], None] | None) -> None:
        """Record how much later than planned this process runs, which adds to the latencies that it measures."""
        while True:
            due = time.perf_counter() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            if self.now_s() >= self._period.warm_up_s:
                self.records.late_ms.append(max(0.0, time.perf_counter() - due) * 1e3)
            if watch is not None:
                watch(self.records, self.now_s())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield endless arrival times of independent requests, in seconds since the start.

    Args:
        rate: Mean arrivals per second.
        seed: The same seed gives the same times.
    """
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure of a group, however deep."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
