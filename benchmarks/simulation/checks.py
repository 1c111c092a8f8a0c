"""Checks of the simulation: against an exact formula, and against engines that were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from benchmarks.simulation.outcome import FleetResult, FleetSettings
from benchmarks.simulation.routing import AffinityRouting, LeastLoadRouting, RandomRouting, Routing
from benchmarks.simulation.service import cpu_service
from benchmarks.simulation.simulator import Fleet
from benchmarks.simulation.traffic import Conversation
from pipeline.plan.performance.accuracy import full_load_requests, served_figure
from pipeline.plan.performance.published import figures
from pipeline.plan.performance.served_engine import ServedEngine
from pipeline.plan.performance.step_times import StepTimes

_T_95 = 2.262  # 95 % of Student's t with nine degrees of freedom lie within
_RUNS = 10
_TEMPLATE = 6


def erlang_c(servers: int, load: float) -> float:
    """Probability that a request waits in a queue with random arrivals, random service and several servers (M/M/c).

    Args:
        servers: Number of servers.
        load: Arrivals a second times seconds of service; below `servers`.

    >>> round(erlang_c(1, 0.8), 3), round(erlang_c(4, 3.2), 3)
    (0.8, 0.596)
    """
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**at / math.factorial(at) for at in range(servers)) + last)


def random_queue(servers: int, load: float, requests: int, seed: int) -> FleetResult:
    """Run replicas with one slot each, and answers of random length without prompts: an M/M/c queue.

    Args:
        servers: Replicas.
        load: Arrivals a second; service takes one second on average.
        requests: Number of requests.
        seed: Seed of the arrivals and lengths.
    """
    chance = np.random.default_rng(seed)
    times = accumulate(chance.exponential(1 / load, requests).tolist())
    lengths = chance.exponential(1.0, requests).tolist()
    service = ServedEngine("M/M/c", StepTimes(lambda *_: 1.0), slots=1, blocks=1_000_000)
    conversations = (
        Conversation(number, start, 0, 0, 0, (0,), (length,), ())
        for number, (start, length) in enumerate(zip(times, lengths, strict=True))
    )
    return Fleet(FleetSettings(service, servers), conversations, math.inf, LeastLoadRouting()).run()


def against_erlang_c(servers: int = 4, load: float = 3.2, requests: int = 20_000) -> dict[str, Any]:
    """Compare mean waits of ten runs with the formula.

    Args:
        servers: Replicas.
        load: Arrivals a second; service takes one second on average.
        requests: Requests of each run.

    Returns:
        The formula's mean wait, that of the runs, and half of its 95 % interval, in seconds.
    """
    waits = []
    for seed in range(_RUNS):
        queued = random_queue(servers, load, requests, seed).queued_s
        # Without the time in which the queue fills, about a tenth.
        waits.append(float(queued[requests // 10 :].mean()))
    half = _T_95 * statistics.stdev(waits) / math.sqrt(_RUNS)
    return {
        "servers": servers,
        "load": load / servers,
        "expected_s": erlang_c(servers, load) / (servers - load),
        "simulated_s": statistics.fmean(waits),
        "half_interval_s": half,
    }


def all_at_once(service: ServedEngine, count: int, prompt: int, answer: int) -> FleetResult:
    """Run one replica on requests that all wait at the start.

    Args:
        service: The replica.
        count: Number of requests.
        prompt: Tokens of each prompt.
        answer: Tokens of each answer.
    """
    conversations = (
        Conversation(number, 0.0, number, 0, 0, (prompt,), (answer,), ()) for number in range(count)
    )
    return Fleet(FleetSettings(service, 1), conversations, math.inf, LeastLoadRouting()).run()


def tokens_per_s(result: FleetResult) -> float:
    """Tokens of answers a second, from the first question to the end of the last answer."""
    return float(result.answer.sum() / (result.arrived_s + result.total_s).max())


def against_published(model: str, gpu: str) -> Iterator[dict[str, Any]]:
    """Compare with published throughput: all requests wait at the start, as many at a time as memory holds.

    Args:
        model: Name in the published figures.
        gpu: Name in recipes.

    Yields:
        For each figure the measurement and the simulation's value, in tokens a second.
    """
    for figure in figures():
        if (figure.kind, figure.model, figure.gpu, figure.split.pipeline) == ("full-load", model, gpu, 1):
            service = replace(served_figure(figure), max_prompt=figure.prompt_tokens)
            run = all_at_once(service, full_load_requests(figure), figure.prompt_tokens, figure.output_tokens)
            yield {
                "figure": figure.label,
                "measured": figure.measured["throughput"],
                "simulated": round(tokens_per_s(run), 1),
            }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Summarize relative errors of rows of `against_published`."""
    off = sorted(abs(row["simulated"] / row["measured"] - 1) for row in rows)
    return {"count": len(off), "median": statistics.median(off), "worst": off[-1]} if off else {"count": 0}


def against_cpu(rows: Sequence[Mapping[str, Any]], streams: int = 8) -> dict[str, Any]:
    """Compare with streams of the `cpu` engine that its service was not made from.

    Args:
        rows: Rows of the JSON of `python benchmarks/cpu_engine.py`.
        streams: Streams of the row that is left out.
    """
    (held,) = (row for row in rows if row["way"] == "no draft" and row["streams"] == streams)
    service = cpu_service(rows, leave_out=streams)
    made = replace(service, slots=streams)
    run = all_at_once(made, 100 * streams, prompt=24, answer=64)
    return {
        "streams": streams,
        "measured": held["tokens_per_second"],
        "simulated": tokens_per_s(run),
    }


def against_replicas(
    measured: Sequence[Mapping[str, Any]], cpu: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Compare with the KV reuse of real servers behind the gateway, under the load of `benchmarks/replicas.py`.

    Args:
        measured: Rows of its JSON.
        cpu: Rows of the JSON of `python benchmarks/cpu_engine.py`.

    Yields:
        For each row the share of the prompts' tokens that were reused, as measured and as simulated.
    """
    service = replace(cpu_service(cpu), max_prompt=1024, blocks=4096)
    for row in measured:
        ways: dict[str, Routing] = {
            "random": RandomRouting(),
            "least-load": LeastLoadRouting(),
            "affinity": AffinityRouting(),
        }
        settings = FleetSettings(service, row["servers"])
        run = Fleet(settings, _users(row["users"]), math.inf, ways[row["spread"]]).run()
        reused = float(run.cached.sum() / run.prompt.sum())
        yield {
            "servers": row["servers"], "way": row["spread"], "measured": row["kv_reuse"], "simulated": round(reused, 3),
        }  # fmt: skip


def _users(count: int, conversations: int = 20) -> list[Conversation]:
    """Make people who have one conversation of eight questions after the other, as in `benchmarks/replicas.py`."""
    chance, first = np.random.default_rng(0), list[Conversation]()
    for user in range(count):
        then: Conversation | None = None
        for number in range(conversations):
            # Each message has some tokens of the chat template around it.
            questions = (chance.integers(48, 80, 8, endpoint=True) + _TEMPLATE).tolist()
            answers = chance.integers(8, 24, 8, endpoint=True).tolist()
            key = int(chance.integers(0, 2**64, dtype=np.uint64))
            then = Conversation(
                user * conversations + number,
                0.0,
                0,
                96 + _TEMPLATE,
                key,
                questions,
                answers,
                (0.5,) * 7,
                then,
            )
        assert then is not None, "there is one conversation or more"
        first.append(then)
    return first
