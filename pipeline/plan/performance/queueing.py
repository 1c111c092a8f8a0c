"""Requests before one engine, simulated: as many at a time as a benchmark keeps in flight, or so many a second.

    run = closed_loop(service, 64, work)          64 clients that start at once, each asks when its answer has ended
    run = open_arrivals(service, 2.5, work)       2.5 requests a second, at random times

Lengths are spread around their means as benchmarks spread them. All is drawn from one seed: the same question has the
same answer. What a benchmark reports counts everything from the start, where prompts queue behind prompts; an SLO is
judged on requests that came later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from pipeline.plan.performance.disaggregated import DisaggregatedEngines
from pipeline.plan.performance.scheduler import EngineRequest, EngineScheduler
from pipeline.plan.performance.served_engine import ServedEngine
from pipeline.plan.performance.step_times import StepTimes

Values = npt.NDArray[np.float64]
Engines = ServedEngine | DisaggregatedEngines

WAVES = 10  # requests of each client, as InferenceX's benchmarks of TensorRT-LLM have them
_BUNDLES = 512  # clients that are simulated one by one; of more, several are taken for one
_MOST_AT_ONCE = 1500
_SEED = 1
_REQUESTS = 1500  # of an open arrival
_SETTLING = 0.2  # share of these that are not counted
_TINY = 1e-9


@dataclass(frozen=True)
class Workload:
    """Requests by their mean lengths in tokens.

    Attributes:
        prompt_tokens: Mean of prompts.
        output_tokens: Mean of answers.
        spread: Lengths lie evenly within this share of their mean, above and below.
    """

    prompt_tokens: int
    output_tokens: int
    spread: float = 0.2

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence has behind it, on average over its answer."""
        return self.prompt_tokens + self.output_tokens / 2

    def lengths(self, count: int) -> list[tuple[int, int]]:
        """Draw prompts and answers, the same each time."""
        return list(_lengths(self, count))


@lru_cache(maxsize=64)
def _lengths(work: Workload, count: int) -> tuple[tuple[int, int], ...]:
    rng = np.random.default_rng(_SEED)
    means = np.array([work.prompt_tokens, work.output_tokens])
    factors = rng.uniform(1 - work.spread, 1 + work.spread, (count, 2))
    drawn = np.maximum(1, np.rint(means * factors)).astype(int)
    return tuple((prompt, answer) for prompt, answer in drawn.tolist())


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Times in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Values, weights: Values | None = None) -> Self:
        """Sum values up; `weights` says how often each came."""
        if not len(seconds):
            return cls(math.nan, math.nan, math.nan, math.nan)
        order = np.argsort(seconds, kind="stable")
        ordered = seconds[order]
        counted = np.ones(len(seconds)) if weights is None else weights[order]
        before = np.cumsum(counted)
        at = [int(np.searchsorted(before, share * before[-1])) for share in (0.5, 0.95, 0.99)]
        mean = float((ordered * counted).sum() / before[-1])
        p50, p95, p99 = (float(ordered[min(place, len(ordered) - 1)]) for place in at)
        return cls(1e3 * mean, 1e3 * p50, 1e3 * p95, 1e3 * p99)


@dataclass(frozen=True)
class QueueRun:
    """Outcome of a simulation. Arrays have an element for each request, in the order in which they were asked.

    Attributes:
        asked_s: Time when it was asked.
        first_s: Time of its first token.
        ended_s: Time of its last.
        prompts: Tokens of prompts.
        answers: Tokens of answers.
        steps: Steps of the engine, see `EngineScheduler`.
        settled: First request that counts for an SLO.
        bundle: Clients that each request stands for.
        progress: Tokens that a step brings a sequence.
        request_s: Seconds before the engine has a request.
    """

    asked_s: Values
    first_s: Values
    ended_s: Values
    prompts: Values
    answers: Values
    steps: Values
    settled: int
    bundle: int
    progress: float
    request_s: float

    @cached_property
    def first_tokens_s(self) -> Values:
        """Seconds to the first token, of each request."""
        return self.first_s - self.asked_s + self.request_s

    @cached_property
    def ttft(self) -> Percentiles:
        """First tokens of all requests, the start included, as benchmarks report them."""
        return Percentiles.of(self.first_tokens_s)

    @cached_property
    def settled_ttft(self) -> Percentiles:
        """First tokens of requests that came when the start was over."""
        later = self.settled if self.settled < len(self.asked_s) else 0
        return Percentiles.of(self.first_tokens_s[later:])

    @cached_property
    def itl(self) -> Percentiles:
        """Times between tokens; the mean is that of requests, each with the time of an output token after the first."""
        seconds, count, sequences = self.steps[:, 0], self.steps[:, 1], self.steps[:, 2]
        running = sequences > 0
        each = seconds[running] / np.maximum(count[running], _TINY) / self.progress
        found = Percentiles.of(each, (count * sequences)[running])
        return replace(found, mean=1e3 * self.tpot_s)

    @cached_property
    def tpot_s(self) -> float:
        """Mean seconds of an output token after the first."""
        several = self.answers > 1
        if not several.any():
            return math.nan
        return float(((self.ended_s - self.first_s)[several] / (self.answers[several] - 1)).mean())

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        return float(self.ended_s.max() - self.asked_s.min())

    @property
    def in_flight(self) -> float:
        """Requests inside, on average."""
        return self.bundle * float((self.ended_s - self.asked_s).sum()) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second from the first request to the last answer."""
        return self.bundle * float(self.answers.sum()) / self.seconds

    def prompt_share(self, times: StepTimes) -> float:
        """Share of the engine's time that prompts take."""
        mixed = self.steps[self.steps[:, 4] > 0]
        bare = mixed.copy()
        bare[:, 2] *= self.bundle
        bare[:, 3] *= self.bundle
        bare[:, 4:] = 0.0
        alone = (times.several(bare) * (mixed[:, 2] > 0)).sum()
        return float((mixed[:, 0].sum() - alone) / max(self.steps[:, 0].sum(), _TINY))


def closed_loop(service: Engines, clients: int, work: Workload, waves: int = WAVES) -> QueueRun:
    """Simulate clients that start at once, and ask again as soon as an answer has ended.

    Args:
        service: The engine.
        clients: Requests in flight at any time; those beyond the engine's slots wait.
        work: Lengths.
        waves: Requests of each client, on average.
    """
    bundle = -(-clients // _BUNDLES)
    single = service.bundled(bundle)
    several = -(-clients // bundle)
    lengths = work.lengths(several * waves)
    return _run(single, lengths, [0.0] * several, bundle, several)


def open_arrivals(
    service: Engines, requests_per_s: float, work: Workload, count: int = _REQUESTS
) -> QueueRun:
    """Simulate requests that come at random, whatever the engine does (Poisson).

    Args:
        service: The engine.
        requests_per_s: Rate.
        work: Lengths.
        count: Requests.
    """
    gaps = np.random.default_rng(_SEED + 1).exponential(1 / requests_per_s, count)
    return _run(service, work.lengths(count), np.cumsum(gaps).tolist(), 1, round(count * _SETTLING))


def all_at_once(service: Engines, count: int, work: Workload) -> QueueRun:
    """Simulate requests that all wait at the start; of many, several are taken for one."""
    bundle = -(-count // _MOST_AT_ONCE)
    several = -(-count // bundle)
    return _run(service.bundled(bundle), work.lengths(several), [0.0] * several, bundle, 0)


def _run(
    service: Engines,
    lengths: Sequence[tuple[int, int]],
    starts: Sequence[float],
    bundle: int,
    settled: int,
) -> QueueRun:
    """Run requests through an engine: `starts` are the times of the first ones, others follow an answer's end."""
    scheduler = (
        EngineScheduler[EngineRequest](service, record=True)
        if isinstance(service, ServedEngine)
        else service.scheduler()
    )
    asked = [EngineRequest(*lengths[index], start) for index, start in enumerate(starts)]
    coming, waiting = deque(asked), deque[EngineRequest]()
    ended_s: dict[int, float] = {}
    advance, plan, slots, admit_s = scheduler.advance, scheduler.plan, service.slots, service.admit_s
    due, free_s, now = math.inf, 0.0, 0.0
    handed = max(coming[0].arrived_s, free_s) + admit_s if coming else math.inf
    while True:
        now = handed if handed < due else due
        if now == math.inf:
            break
        for request in advance(now):
            ended_s[id(request)] = now
            if len(asked) < len(lengths):
                asked.append(EngineRequest(*lengths[len(asked)], now))
                coming.append(asked[-1])
        # The front end hands requests over one by one, in the order in which they were asked.
        handed = math.inf
        while coming:
            arrived_s = coming[0].arrived_s
            handed = (arrived_s if arrived_s > free_s else free_s) + admit_s
            if handed > now:
                break
            free_s, handed = handed, math.inf
            waiting.append(coming.popleft())
        while waiting and scheduler.in_flight < slots:
            scheduler.give(waiting.popleft(), now)
        due = plan(now)
    rows = [
        (
            request.arrived_s,
            request.first_token_s or 0.0,
            ended_s[id(request)],
            request.prompt,
            request.answer,
        )
        for request in asked
    ]
    columns = np.array(rows, np.float64).T
    steps = np.array(scheduler.steps, np.float64)
    asked_s, first_s, ends_s, prompts, answers = columns
    progress, request_s = service.progress, service.request_s
    return QueueRun(asked_s, first_s, ends_s, prompts, answers, steps, settled, bundle, progress, request_s)


@dataclass(frozen=True)
class LoadTrace:
    """Steps of a simulated load, and how often each counts in a figure: recomputes figures for other constants at once.

    The schedule stays that of the simulation, which hardly depends on constants that are nearly right.

    Attributes:
        steps: Rows as `EngineScheduler.steps` has them, alike ones joined, each client counted.
        weights: Name of a figure ("ttft", "ttft_p95", "tpot", "seconds") -> how often its steps count.
        idle_s: The same name -> seconds in which the engine had nothing to do, as while a request is handed over.
        request_s: Seconds before the engine has a request.
        bundle: Clients that each request of the simulation stands for.
    """

    steps: Values
    weights: dict[str, Values]
    idle_s: dict[str, float]
    request_s: float
    bundle: int

    @classmethod
    def of(cls, run: QueueRun) -> Self:
        """Take the trace of a run of clients that ask one after the other."""
        ends = np.cumsum(run.steps[:, 0])
        asked, first, ended = (
            np.searchsorted(ends, times + 1e-7 * np.maximum(times, 1.0))
            for times in (run.asked_s, run.first_s, run.ended_s)
        )
        waits = run.first_tokens_s
        late = np.zeros(len(waits), bool)
        late[run.settled if run.settled < len(waits) else 0 :] = True
        low, high = np.quantile(waits[late], (0.9, 0.98))
        late &= (waits >= low) & (waits <= high)
        several = (run.answers > 1) / np.maximum(run.answers - 1, 1)
        weights = {
            "ttft": _spans(asked, first, np.full(len(asked), 1 / len(asked)), len(ends)),
            "ttft_p95": _spans(asked, first, late / max(late.sum(), 1), len(ends)),
            "tpot": _spans(first, ended, several / max((several > 0).sum(), 1), len(ends)),
            "seconds": np.ones(len(ends)),
        }
        idle = run.steps[:, 0] * (run.steps[:, 1] <= 0)
        idle_s = {name: float((idle * often).sum()) for name, often in weights.items()}
        return cls(*_joined(run, weights), idle_s, run.request_s, run.bundle)

    def figures(self, times: StepTimes) -> dict[str, float]:
        """Recompute the figures, in seconds."""
        seconds = times.several(self.steps)
        found = {
            name: float((seconds * often).sum()) + self.idle_s[name] for name, often in self.weights.items()
        }
        waits = {name: found[name] + self.request_s for name in ("ttft", "ttft_p95")}
        return found | waits


def _spans(begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64], weights: Values, count: int) -> Values:
    """Add up weights of spans of steps, by step."""
    changes = np.zeros(count + 1)
    np.add.at(changes, np.minimum(begin, count), weights)
    np.add.at(changes, np.minimum(end, count), -weights)
    return np.cumsum(changes)[:count]


def _joined(run: QueueRun, weights: dict[str, Values]) -> tuple[Values, dict[str, Values]]:
    """Join steps that are alike in sequences and tokens of prompts."""
    steps = run.steps
    number, sequences, tokens = steps[:, 1], np.maximum(steps[:, 2], 1), steps[:, 4]
    kinds = (
        1e4 * (tokens > 0)
        + 1e2 * np.floor(3 * np.log2(sequences))
        + np.floor(2 * np.log2(np.maximum(tokens, 1)))
    )
    kinds += 0.5 * (steps[:, 2] > 0)
    _, place = np.unique(kinds, return_inverse=True)
    often = {
        name: np.asarray(np.bincount(place, number * series), np.float64) for name, series in weights.items()
    }
    weight = number * sum(series / max(float(series.max()), _TINY) for series in weights.values())
    joined: Values = np.stack([np.bincount(place, weight * column) for column in steps.T], axis=1)
    joined /= np.maximum(np.bincount(place, weight), _TINY)[:, None]
    joined[:, 2:7] *= run.bundle
    return joined, often
