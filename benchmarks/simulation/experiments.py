"""Questions to the simulation: each as rows of a table, with a scenario for each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation.autoscaler import Behavior, ChangePolicy, ScalingRule, Trigger
from benchmarks.simulation.outcome import Loss
from benchmarks.simulation.scenarios import Scenario, Way, full_rate, service_of
from benchmarks.simulation.traffic import DAY_S, PEOPLE, PROGRAMS, Arrivals, Burst, Kind
from pipeline.deploy.containers import ScalingPolicy

RECIPE, LARGER = "qwen3-32b-fp8", "llama-3.1-8b-fp8"
WAYS: tuple[Way, ...] = ("random", "least load", "affinity")
LOAD = 0.7  # of the load that fills a replica, by default
# Until a replica takes requests: scheduling, start of Triton and warm-up, and its weights from a volume. Assumptions.
_START_S, _BYTES_PER_S = 60.0, 1e9

# The recommendation is the policy of the manifests: one place for both.
POLICY = ScalingPolicy()
UP = Behavior(
    POLICY.up_window_s,
    (ChangePolicy("Percent", POLICY.up_percent, 60), ChangePolicy("Pods", POLICY.up_pods, 60)),
)
DOWN = Behavior(
    POLICY.down_window_s,
    (ChangePolicy("Percent", POLICY.down_percent, 60), ChangePolicy("Pods", POLICY.down_pods, 60)),
)

# Names of rules that the picture of a day shows.
CHOSEN, HASTY, LATE = (
    "as the manifests have it",
    "requests 0.7, Kubernetes' defaults",
    "waiting requests, queue time and KV use",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        labels: Column -> value.
        scenario: Scenario of the row.
    """

    labels: dict[str, Any]
    scenario: Scenario


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the simulation.

    Attributes:
        minutes: Share of the full time.
        replicas: Sizes of fleets.
        days: Share of a day.
    """

    minutes: float = 1.0
    replicas: tuple[int, ...] = (1, 4, 16, 64, 500)
    days: float = 1.0


SMALL = Sizes(0.2, (1, 4), 1 / 48)


def arrivals(recipe: str, kind: Kind, replicas: float, load: float, length_s: float, **more: Any) -> Arrivals:
    """Make arrivals for a number of replicas.

    Args:
        recipe: Recipe of the replicas.
        kind: Kind of traffic.
        replicas: Number of replicas.
        load: Share of the load that fills them.
        length_s: Seconds of the run.
        **more: Further fields of `Arrivals`.
    """
    return Arrivals(full_rate(service_of(recipe), kind) * replicas * load, length_s, **more)


def start_s(recipe: str) -> float:
    """Seconds from the decision to start a replica until it takes requests."""
    return _START_S + service_of(recipe).weight_bytes / _BYTES_PER_S


def affinity_rows(sizes: Sizes) -> list[Row]:
    """Ways to choose a replica, by the number of replicas, the kind of traffic, and the recipe."""
    middle = sizes.replicas[min(2, len(sizes.replicas) - 1)]
    settings = [(RECIPE, PROGRAMS, replicas, 360.0, 1.0) for replicas in sizes.replicas]
    settings += [(RECIPE, PEOPLE, middle, 1800.0, 1.0), (RECIPE, PEOPLE, middle, 1800.0, 8.0)]
    settings += [(LARGER, PROGRAMS, 4, 360.0, 1.0), (LARGER, PEOPLE, 4, 900.0, 1.0)]
    rows = []
    for recipe, kind, replicas, seconds, kv_times in settings:
        for way in WAYS if replicas > 1 else WAYS[-1:]:
            length_s = seconds * sizes.minutes
            scenario = Scenario(
                recipe,
                arrivals(recipe, kind, replicas, LOAD, length_s),
                replicas,
                kind,
                way,
                since_s=length_s * 0.4,
                kv_times=kv_times,
            )
            labels = {
                "recipe": recipe,
                "traffic": kind.name,
                "replicas": replicas,
                "pages": kv_times,
                "way": way,
            }
            rows.append(Row(labels, scenario))
    return rows


def bound_rows(sizes: Sizes) -> list[Row]:
    """Bounds of affinity, at two loads."""
    length_s, replicas = 600 * sizes.minutes, 16
    return [
        Row(
            {"load": load, "c": bound},
            Scenario(
                RECIPE, arrivals(RECIPE, PROGRAMS, replicas, load, length_s), replicas, PROGRAMS, bound=bound,
                since_s=length_s * 0.4,
            ),
        )
        for load in (0.9, 1.3)
        for bound in (1.05, 1.1, 1.25, 1.5, 2.0, math.inf)
    ]  # fmt: skip


def queue_rows(sizes: Sizes) -> list[Row]:
    """Limits of the queue, in five minutes of five times the load, without scaling."""
    length_s, replicas, slots = 2400 * sizes.minutes, 16, service_of(RECIPE).slots
    burst = Burst(length_s / 2, 300 * sizes.minutes)
    base = Scenario(
        RECIPE, arrivals(RECIPE, PEOPLE, replicas, 0.5, length_s, bursts=(burst,)), replicas,
        since_s=burst.start_s, until_s=burst.start_s + 2 * burst.length_s,
    )  # fmt: skip
    return [
        Row({"limit": share}, replace(base, queue_limit=None if share is None else round(share * slots)))
        for share in (0.0, 0.125, 0.25, 1.0, 4.0, None)
    ]


def rules(most: int) -> dict[str, ScalingRule | None]:
    """List the rules of scaling that are compared, by their names, for at most so many replicas."""
    slots, ttft_s = service_of(RECIPE).slots, service_of(RECIPE).ttft_s
    queue = Trigger("queue_time_s", POLICY.queue_time * ttft_s, "Value")
    pages = Trigger("kv_use", POLICY.kv_cache, "Value")

    def requests(share: float) -> Trigger:
        return Trigger("requests", share * slots)

    def calm(*triggers: Trigger) -> ScalingRule:
        return ScalingRule(triggers, 2, most, UP, DOWN)

    return {
        "none: as many as the burst needs": None,
        "queue time, Kubernetes' defaults": ScalingRule((queue,), 2, most),
        LATE: calm(Trigger("waiting", 0.25 * slots), queue, pages),
        HASTY: ScalingRule((requests(0.7),), 2, most),
        "requests 0.7": calm(requests(0.7)),
        CHOSEN: calm(Trigger("requests", POLICY.requests * slots, spare=POLICY.spare), queue, pages),
        "requests 0.5": calm(requests(0.5)),
        "requests 0.9": calm(requests(0.9)),
    }


def day_rows(sizes: Sizes) -> list[Row]:
    """Rules of scaling through a day, with a burst in the morning and a node that is lost in the afternoon."""
    length_s, peak, most = DAY_S * sizes.days, 5, 24
    burst = Burst(length_s * 10.5 / 24, 600 * min(1.0, sizes.days * 12))
    coming = arrivals(RECIPE, PEOPLE, peak, LOAD, length_s, valley=0.2, bursts=(burst,))
    slots = service_of(RECIPE).slots
    return [
        Row(
            {"rule": name},
            Scenario(
                RECIPE, coming, most if rule is None else 4, rule=rule,
                queue_limit=slots,
                start_s=start_s(RECIPE), losses=(Loss(length_s * 15 / 24, replaced_s=40 + POLICY.lost_node_s),),
                timeline=name in (CHOSEN, HASTY, LATE),
            ),
        )
        for name, rule in rules(most).items()
    ]  # fmt: skip


def loss_rows(sizes: Sizes) -> list[Row]:
    """A node that is lost, by size, replicas to spare, and how long Kubernetes waits before it replaces the pod."""
    length_s = 2400 * sizes.minutes
    lost_s = length_s / 2
    return [
        Row(
            {"replicas": replicas, "spare": spare, "toleration_s": toleration_s},
            Scenario(
                RECIPE, arrivals(RECIPE, PEOPLE, replicas, 0.9, length_s), replicas + spare,
                queue_limit=service_of(RECIPE).slots, start_s=start_s(RECIPE), losses=(Loss(lost_s, replaced_s=40 +
                toleration_s),), since_s=lost_s - 60 * sizes.minutes, until_s=lost_s + 600 * sizes.minutes,
            ),
        )
        for replicas in (2, 4, 16)
        for spare, toleration_s in ((0, 300.0), (0, POLICY.lost_node_s), (1, 300.0), (1, POLICY.lost_node_s))
    ]  # fmt: skip


def start_rows(sizes: Sizes) -> list[Row]:
    """Five times the load for ten minutes, by how long a replica takes to start."""
    length_s, replicas = 3600 * sizes.minutes, 4
    burst = Burst(length_s / 3, 600 * sizes.minutes)
    return [
        Row(
            {"start_s": seconds, "spare": spare},
            Scenario(
                RECIPE, arrivals(RECIPE, PEOPLE, replicas, LOAD, length_s, bursts=(burst,)), replicas + spare,
                rule=ScalingRule(
                    (Trigger("requests", POLICY.requests * service_of(RECIPE).slots, spare=spare),), 2, 32, UP,
                DOWN), queue_limit=service_of(RECIPE).slots, start_s=seconds, since_s=burst.start_s,
                until_s=burst.start_s + burst.length_s,
            ),
        )
        for seconds in (30.0, 90.0, 300.0)
        for spare in (0, 1, 4)
    ]  # fmt: skip


SECTIONS: dict[str, Callable[[Sizes], list[Row]]] = {
    "affinity": affinity_rows,
    "bounds": bound_rows,
    "queues": queue_rows,
    "day": day_rows,
    "losses": loss_rows,
    "starts": start_rows,
}
