"""One run of a fleet as a value that can be handed to another process, and its summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from benchmarks.simulation.autoscaler import ScalingRule
from benchmarks.simulation.outcome import FleetResult, FleetSettings, Loss
from benchmarks.simulation.routing import AffinityRouting, LeastLoadRouting, RandomRouting, Routing
from benchmarks.simulation.service import recipe_service
from benchmarks.simulation.simulator import Fleet
from benchmarks.simulation.traffic import PEOPLE, Arrivals, Kind, Traffic
from pipeline.client.spreading import LOAD_BOUND, LOAD_FLOOR
from pipeline.plan.performance.served_engine import ServedEngine

Way = Literal["random", "least load", "affinity"]
_LINE_S = 600.0  # between points of a time line

service_of = cache(recipe_service)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and its traffic.

    Attributes:
        recipe: Recipe of each replica.
        arrivals: Times of requests.
        replicas: Replicas at the beginning.
        kind: Kind of traffic.
        way: How replicas are chosen.
        bound: Bound of affinity.
        floor: Requests that a replica may always have with affinity.
        rule: Rule of scaling, or None.
        queue_limit: See `FleetSettings`.
        start_s: See `FleetSettings`.
        losses: Nodes that are lost.
        since_s: Begin of the time whose requests are counted; those before fill the caches.
        until_s: End of that time.
        kv_times: Pages of the KV cache, as a multiple of those in the GPU's memory.
        seed: Seed of the traffic.
        timeline: Whether the course of time is kept, too.
    """

    recipe: str
    arrivals: Arrivals
    replicas: int
    kind: Kind = PEOPLE
    way: Way = "affinity"
    bound: float = LOAD_BOUND
    floor: int = LOAD_FLOOR
    rule: ScalingRule | None = None
    queue_limit: int | None = None
    start_s: float = 60.0
    losses: tuple[Loss, ...] = ()
    since_s: float = 0.0
    until_s: float = math.inf
    kv_times: float = 1.0
    seed: int = 1
    timeline: bool = False

    def run(self) -> dict[str, Any]:
        """Run the scenario, and sum it up."""
        result = simulate(self)
        added, removed, turns = result.changes
        ready = result.samples[:, 3]
        summary = result.summary(self.since_s, self.until_s) | {
            "gpu_hours": round(result.gpu_hours, 3),
            "most_replicas": int(ready.max()),
            "fewest_replicas": int(ready.min()),
            "added": added,
            "removed": removed,
            "turns": turns,
        }
        return summary | {"timeline": timeline(result)} if self.timeline else summary


def simulate(scenario: Scenario) -> FleetResult:
    """Run the fleet of a scenario."""
    service = service_of(scenario.recipe)
    if scenario.kv_times != 1:
        service = replace(service, blocks=round(service.blocks * scenario.kv_times))
    settings = FleetSettings(
        service, scenario.replicas, scenario.rule, scenario.queue_limit, scenario.start_s, scenario.losses
    )
    routing: Routing
    if scenario.way == "affinity":
        routing = AffinityRouting(scenario.bound, scenario.floor)
    else:
        routing = LeastLoadRouting() if scenario.way == "least load" else RandomRouting(scenario.seed)
    traffic = Traffic(scenario.kind, scenario.arrivals, scenario.seed)
    return Fleet(settings, traffic.conversations(), scenario.arrivals.length_s, routing).run()


def run_all(scenarios: Sequence[Scenario], workers: int) -> list[dict[str, Any]]:
    """Run scenarios in several processes, the largest first.

    Args:
        scenarios: Scenarios in any order.
        workers: Number of processes.

    Returns:
        Summaries, in the order of the scenarios.
    """
    if workers < 2:
        return [scenario.run() for scenario in scenarios]
    order = sorted(range(len(scenarios)), key=lambda at: -_size(scenarios[at]))
    with ProcessPoolExecutor(workers) as pool:
        running = {at: pool.submit(scenarios[at].run) for at in order}
        return [running[at].result() for at in range(len(scenarios))]


def _size(scenario: Scenario) -> float:
    return scenario.arrivals.requests_per_s * scenario.arrivals.length_s


def full_rate(service: ServedEngine, kind: Kind) -> float:
    """Requests a second that fill a replica if nothing of any prompt is in its cache: the unit of loads."""
    return service.requests_per_s(kind.mean_prompt, kind.answer, 0)


def timeline(result: FleetResult) -> dict[str, list[float]]:
    """Make the course of time, in steps of ten minutes: requests a second, p99 of TTFT, replicas ready."""
    edges = np.arange(0.0, result.length_s + 1, _LINE_S)
    line: dict[str, list[float]] = {"hours": [], "requests_per_s": [], "ttft_p99_s": [], "replicas": []}
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        found = result.summary(begin, end)
        ready = result.samples[(result.samples[:, 0] >= begin) & (result.samples[:, 0] < end), 3]
        line["hours"].append(round(begin / 3600, 3))
        line["requests_per_s"].append(round(found["asked"] / (end - begin), 3))
        line["ttft_p99_s"].append(found["ttft_p99_s"])
        line["replicas"].append(round(float(ready.mean()), 2))
    return line
