"""Status of each model for /readyz and the gauges: of one process, or of all workers of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at one moment.

    Attributes:
        deployment: digest of the package that new requests go to.
        endpoints: host:port of its servers.
        fault: reason why it cannot be asked; None if it can.
        stale: reason why it is not the package that its record names; it can be asked all the same.
        replaced_requests: requests under way with packages that it has replaced.
        running: choices that have a slot.
        waiting: choices that wait for one.
        stalled: choices that have begun, and had no chunk for long.
        loss_events: event -> how often it happened; see `fair_queue.FairQueue.loss_events`.
    """

    deployment: str
    endpoints: Sequence[str]
    fault: str | None = None
    stale: str | None = None
    replaced_requests: int = 0
    running: int = 0
    waiting: int = 0
    stalled: int = 0
    loss_events: Mapping[str, int] = field(default_factory=dict)

    def merge(self, others: Sequence[ModelStatus]) -> ModelStatus:
        """Add the status of the same model in other workers, whatever package they are at.

        Returns:
            This package and its endpoints, which count as the model's until all workers have gone over to others, and
            this fault and queue, which all workers share; with the sums of what each worker has of its own.
        """
        every = (self, *others)
        return replace(
            self,
            stale=next((one.stale for one in every if one.stale is not None), None),
            replaced_requests=sum(one.replaced_requests for one in every),
            stalled=sum(one.stalled for one in every),
        )


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """All models of a gateway, and its processes.

    Attributes:
        models: by name.
        workers: processes that serve it.
        worker_restarts: how often one was started again.
    """

    models: Mapping[str, ModelStatus] = field(default_factory=dict)
    workers: int = 1
    worker_restarts: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold, for `of_json`."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> GatewayStatus:
        """Read the values of `as_json`."""
        models = {name: ModelStatus(**status) for name, status in values["models"].items()}
        return cls(**{**values, "models": models})


def readiness_page(models: Mapping[str, ModelStatus], *, draining: bool) -> tuple[dict[str, Any], int]:
    """Write the answer of /readyz; `draining`: the gateway is stopping.

    Returns:
        The body, and its HTTP status: 200 if any model can be asked, else 503.
    """
    faults = {name: one.fault for name, one in models.items() if one.fault is not None}
    ready = len(faults) < len(models) and not draining
    if draining:
        faults["gateway"] = "draining"
    # These can be asked all the same.
    stale = {name: one.stale for name, one in models.items() if one.stale is not None}
    described = {
        name: {
            "deployment": one.deployment,
            "endpoints": list(one.endpoints),
            "replaced_requests": one.replaced_requests,
        }
        for name, one in models.items()
    }
    return {"ready": ready, "faults": stale | faults, "models": described}, 200 if ready else 503
