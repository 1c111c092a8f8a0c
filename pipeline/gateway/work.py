"""Requests as blame for lost servers knows them (`pipeline.gateway.blame`), and what it decides of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Work:
    """A request as blame knows it.

    Attributes:
        digest: of everything that decides the work, tenant and model included: equal requests have the same one.
        tenant: name; "" where tenants are not told apart, and then none is convicted.
        request_id: for the log.
        alone: whether it has a turn of its own when it is a suspect, as lines of batches have, which nobody waits for.
    """

    digest: str
    tenant: str
    request_id: str = ""
    alone: bool = False

    @property
    def party(self) -> tuple[str, str]:
        """Suspects with the same one go out together."""
        return self.tenant, self.digest if self.alone else ""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a request, from `LossJudge.began` on.

    Attributes:
        work: the request.
        began: when it was sent.
        trial_until: end of its trial, until which no other tenant's suspects begin; None if it is no suspect.
    """

    work: Work
    began: float
    trial_until: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a request is not sent to a server now.

    Attributes:
        kind: "quarantined": the request itself; "cooling_down": its tenant.
        wait_s: seconds until it may be sent.
        count: losses of the request, or convictions of the tenant.
    """

    kind: Literal["quarantined", "cooling_down"]
    wait_s: float
    count: int


@dataclass(frozen=True, slots=True)
class CoolDown:
    """A tenant begins to cool down."""

    tenant: str
    wait_s: float
    convictions: int


def tenant_hold(tenant: str) -> str:
    """Return the name by which gateways tell each other that a tenant cools down; no digest is equal to it."""
    return f"tenant:{tenant}"
