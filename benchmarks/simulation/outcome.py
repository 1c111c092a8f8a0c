"""Settings of a simulated fleet, and the outcome of its requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.autoscaler import ScalingRule
from pipeline.plan.performance.served_engine import ServedEngine

SERVED, REFUSED, BROKEN = 0, 1, 2

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that is lost, with one replica.

    Attributes:
        at_s: Time of the loss.
        noticed_s: Seconds until the gateway gives it no more requests. `benchmarks/drill.py` measured 2.7 s at most
            for a server that stands still.
        replaced_s: Seconds until Kubernetes starts its pod elsewhere: 40 s until the node counts as gone, and then the
            pod's toleration for that, 300 s by default.
    """

    at_s: float
    noticed_s: float = 2.7
    replaced_s: float = 340.0


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of a fleet.

    Attributes:
        service: Abilities of each replica.
        replicas: Replicas at the beginning, all of them ready.
        rule: Rule of scaling, or None.
        queue_limit: Requests that may wait in the gateway for each replica that is ready; None for no limit.
        start_s: Seconds from the decision to start a replica until it takes requests.
        losses: Nodes that are lost.
    """

    service: ServedEngine
    replicas: int
    rule: ScalingRule | None = None
    queue_limit: int | None = None
    start_s: float = 60.0
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Outcome of all requests. Arrays have an element for each, in the order in which they left the fleet.

    Attributes:
        settings: Settings of the fleet.
        length_s: Seconds in which new requests came, and for which the fleet was paid.
        arrived_s: Time when each was asked.
        outcome: `SERVED`, `REFUSED` or `BROKEN`.
        ttft_s: Seconds to the first token; not a number without one.
        total_s: Seconds to the end, whatever the outcome.
        queued_s: Seconds in the gateway before it was last given to a replica.
        prompt: Tokens of the prompt.
        cached: Tokens of the prompt that were not computed.
        answer: Tokens of answers that ended; else 0.
        tries: Replicas that it was given to.
        samples: Rows of time, requests inside, requests in the gateway, replicas ready, replicas wanted.
        replica_s: Seconds of all replicas that were paid for.
        most_in_flight: Most requests that any replica ever had.
    """

    settings: FleetSettings
    length_s: float
    arrived_s: Values
    outcome: npt.NDArray[np.int8]
    ttft_s: Values
    total_s: Values
    queued_s: Values
    prompt: Values
    cached: Values
    answer: Values
    tries: Values
    samples: Values
    replica_s: float
    most_in_flight: int

    def summary(self, since_s: float = 0.0, until_s: float = math.inf) -> dict[str, Any]:
        """Figures of the requests that were asked from `since_s` until before `until_s`."""
        within = (self.arrived_s >= since_s) & (self.arrived_s < until_s)
        begun = within & ~np.isnan(self.ttft_s)
        ttft, asked = self.ttft_s[begun], int(within.sum())
        p50, p95, p99 = np.percentile(ttft, (50, 95, 99)).tolist() if len(ttft) else (math.nan,) * 3
        in_time = self.ttft_s[within & (self.outcome == SERVED)] <= self.settings.service.ttft_s
        prompts = float(self.prompt[begun].sum())
        return {
            "asked": asked,
            "refused": int((within & (self.outcome == REFUSED)).sum()),
            "broken": int((within & (self.outcome == BROKEN)).sum()),
            "asked_again": int((within & (self.tries > 1)).sum()),
            "ttft_p50_s": round(p50, 4),
            "ttft_p95_s": round(p95, 4),
            "ttft_p99_s": round(p99, 4),
            "in_time": round(float(in_time.sum()) / max(asked, 1), 5),
            "reused": round(float(self.cached[begun].sum()) / prompts, 4) if prompts else 0.0,
            "answer_tokens": float(self.answer[within].sum()),
        }

    @property
    def gpu_hours(self) -> float:
        """Paid hours of GPUs."""
        return self.replica_s * self.settings.service.gpus / 3600

    @property
    def changes(self) -> tuple[int, int, int]:
        """How often replicas were added and removed, and how often one followed the other."""
        steps = [after - before for before, after in pairwise(self.samples[:, 4].tolist()) if after != before]
        turns = sum((step > 0) != (next_one > 0) for step, next_one in pairwise(steps))
        return sum(step > 0 for step in steps), sum(step < 0 for step in steps), turns
