"""Number of replicas by the algorithm of Kubernetes' HorizontalPodAutoscaler (autoscaling/v2).

KEDA makes a HorizontalPodAutoscaler of a ScaledObject and answers it with the result of a query, so that both scale
alike. Every 15 seconds, for each trigger:

    AverageValue    ceil(value / target): the value is of all replicas together
    Value           ceil(replicas that are ready * value / target)

and the number as it is if value and target differ by a tenth or less. The largest of all triggers counts. Of the
numbers within the stabilization window, the smallest counts on the way up, and the largest on the way down. Policies
then bound the changes within a period. Written against the documentation of Kubernetes 1.27 and newer and the
controller's source (pkg/controller/podautoscaler: horizontal.go, replica_calculator.go); pods without metrics are not
modelled, which triggers on external metrics do not know either.

>>> rule = ScalingRule((Trigger("requests", 8.0),), least=2, most=20)
>>> Autoscaler(rule).decide(0.0, current=2, ready=2, values={"requests": 40.0})
5
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Metric = Literal["requests", "waiting", "queue_time_s", "kv_use"]


@dataclass(frozen=True, slots=True)
class Trigger:
    """One metric that replicas are scaled by.

    Attributes:
        metric: `requests`: requests that run and wait, of all replicas; `waiting`: requests that wait; `kv_use`: mean
            share of the pages that requests hold; `queue_time_s`: p95 of the wait of requests that got a slot in the
            last minute.
        target: Target value: of each replica with `AverageValue`, else of the metric itself.
        kind: How Kubernetes compares it.
        spare: Replicas on top of those that the metric asks for: `spare * target` is added to it in the query.
    """

    metric: Metric
    target: float
    kind: Literal["AverageValue", "Value"] = "AverageValue"
    spare: int = 0


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """A bound on changes.

    Attributes:
        kind: `Pods`: a number; `Percent`: a share of the replicas at the beginning of the period.
        value: See `kind`.
        period_s: Seconds for which it holds.
    """

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Behavior:
    """How replicas change in one direction.

    Attributes:
        window_s: Stabilization window.
        policies: The one that allows the most counts.
    """

    window_s: float
    policies: tuple[ChangePolicy, ...]


# Defaults of Kubernetes.
DEFAULT_UP = Behavior(0.0, (ChangePolicy("Percent", 100, 15), ChangePolicy("Pods", 4, 15)))
DEFAULT_DOWN = Behavior(300.0, (ChangePolicy("Percent", 100, 15),))


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """Settings of a HorizontalPodAutoscaler.

    Attributes:
        triggers: The one that asks for the most replicas counts.
        least: `minReplicas`.
        most: `maxReplicas`.
        up: Behavior on the way up.
        down: Behavior on the way down.
        tolerance: Relative difference that changes nothing.
    """

    triggers: tuple[Trigger, ...]
    least: int
    most: int
    up: Behavior = DEFAULT_UP
    down: Behavior = DEFAULT_DOWN
    tolerance: float = 0.1

    def replicas(self, current: int, ready: int, values: Mapping[str, float]) -> int:
        """Compute the replicas that the triggers ask for, before windows, policies and bounds.

        Args:
            current: Replicas wanted by now.
            ready: Replicas that are ready.
            values: Metric -> value.
        """
        return max(self._of(trigger, current, ready, values[trigger.metric]) for trigger in self.triggers)

    def _of(self, trigger: Trigger, current: int, ready: int, value: float) -> int:
        if trigger.kind == "Value":
            ratio = value / trigger.target
            return current if abs(ratio - 1) <= self.tolerance else math.ceil(ratio * ready)
        value += trigger.spare * trigger.target
        ratio = value / (trigger.target * current)
        return current if abs(ratio - 1) <= self.tolerance else math.ceil(value / trigger.target)


class Autoscaler:
    """A rule with its history."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._wanted: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def decide(self, now: float, *, current: int, ready: int, values: Mapping[str, float]) -> int:
        """Decide the number of replicas from now on.

        Args:
            now: Seconds; later than at the last call.
            current: Replicas wanted by now.
            ready: Replicas that are ready.
            values: Metric -> value.
        """
        rule = self.rule
        wanted = self._stabilized(now, current, rule.replicas(current, ready, values))
        if wanted > current:
            wanted = min(wanted, max(current, self._limit(now, current, rule.up, 1)))
        elif wanted < current:
            wanted = max(wanted, min(current, self._limit(now, current, rule.down, -1)))
        wanted = min(max(wanted, rule.least), rule.most)
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _stabilized(self, now: float, current: int, wanted: int) -> int:
        """Take the smallest number of the window on the way up, the largest on the way down."""
        rule = self.rule
        longest = max(rule.up.window_s, rule.down.window_s)
        self._wanted = [(when, number) for when, number in self._wanted if when > now - longest]
        window_s = rule.up.window_s if wanted >= current else rule.down.window_s
        within = [number for when, number in self._wanted if when > now - window_s]
        self._wanted.append((now, wanted))
        return min([wanted, *within]) if wanted >= current else max([wanted, *within])

    def _limit(self, now: float, current: int, behavior: Behavior, sign: int) -> int:
        """Compute how far the policies let the number go in a direction (1 is up)."""
        longest = max(policy.period_s for rule in (self.rule.up, self.rule.down) for policy in rule.policies)
        self._changes = [(when, change) for when, change in self._changes if when > now - longest]
        limits = []
        for policy in behavior.policies:
            begun = current - sum(change for when, change in self._changes if when > now - policy.period_s)
            share = 1 + sign * policy.value / 100
            if policy.kind == "Pods":
                limits.append(begun + sign * policy.value)
            else:
                limits.append(math.ceil(begun * share) if sign > 0 else int(begun * share))
        return max(limits) if sign > 0 else min(limits)
