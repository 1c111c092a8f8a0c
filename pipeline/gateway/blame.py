"""Blame for lost servers: a request, a tenant or the machine. Pure: callers keep the clock and send the requests.

A lost server takes every request with it that was in flight there, and each of them may be the cause.

- Request: one that was in flight at two losses, and was sent again between them, is quarantined, unless it had outlived
  its own turn when the second came in another's.
- Tenant: after a loss the requests that were in flight are suspects. They go out again one tenant at a time, each
  tenant's until they have run for as long as before; lines of batches one by one, after all others. If the next loss
  comes while, of all tenants under suspicion, only one has requests in flight, that tenant is convicted. After two
  convictions within the window it cools down, unless as many losses within the window were the machine's, or no other
  tenant asks.
- Machine: a loss with no request in flight, or one after which suspects passed and none was lost again.

New requests go on meanwhile. After two losses within the window that were not the machine's, new requests of tenants
under suspicion wait for their tenant's turn, too: otherwise a tenant that sends ever new requests would have its losses
fall into the turns of others. docs/explanation/lost-servers.md has the reasons.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

# Losses that a request may be in flight at before it is quarantined.
MAX_LOSSES = 2
# Convictions within the window before a tenant cools down.
_MAX_CONVICTIONS = 2
# Age of losses, suspects and convictions that are forgotten.
WINDOW_S = 1800.0
# First quarantine of a request. It is four times as long after each loss at which no other request was in flight again.
_QUARANTINE_S = 60.0
_MAX_QUARANTINE_S = 3600.0
# First cool-down of a tenant; each further conviction doubles it.
_COOL_DOWN_S = 30.0
MAX_COOL_DOWN_S = 600.0
# Longest turn of a tenant, in which other suspects wait, and longest time for the turns of all tenants after one loss.
TURN_S = 5.0
TURNS_S = 20.0
# Time after the return of a server at which a tenant is under suspicion no more.
_SUSPICION_S = 30.0
# Time in which the requests that were lost with a server report.
_SETTLE_S = 1.0

_MOST_LOSSES = 256
_MOST_SUSPECTS = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """A request as blame knows it.

    Attributes:
        digest: hash of everything that decides the work, tenant and model included; equal for equal requests.
        tenant: name; "" where tenants are not told apart, and then none is convicted.
        request_id: id for the log.
        alone: whether it has a turn of its own when it is a suspect, as lines of batches have, which nobody waits for.
    """

    digest: str
    tenant: str
    request_id: str = ""
    alone: bool = False

    @property
    def party(self) -> tuple[str, str]:
        """Group of suspects that go out together."""
        return self.tenant, self.digest if self.alone else ""


@dataclass(slots=True, eq=False)
class Attempt:
    """Attempt at a request, from `LossJudge.began` on.

    Attributes:
        began: when it was sent.
        trial_until: end of its trial, until which no other tenant's suspects begin; infinite if it is no suspect.
        blamed: False once its server was lost in another's turn, after it had outlived its own.
    """

    work: Work
    began: float
    trial_until: float = inf
    blamed: bool = True


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


@dataclass(slots=True, eq=False)
class _Loss:
    """A server that was lost, at the time `at` at which it was noticed, until it was well again and beyond.

    Attributes:
        suspected: tenants that were under suspicion at that time -> since when.
        tenants: tenants that had requests in flight -> whether one was sent while the tenant was under suspicion.
        passed: whether a request that was in flight was answered when it was asked again.
        repeated: digests of requests that were in flight at another loss, too.
        turn: `Work.party` whose turn it was; None if it was nobody's.
        over: whether the server is well again.
        settled: whether it was judged.
    """

    at: float
    suspected: dict[str, float]
    turn: tuple[str, str] | None = None
    tenants: dict[str, bool] = field(default_factory=dict)
    passed: bool = False
    repeated: set[str] = field(default_factory=set)
    over: bool = False
    settled: bool = False

    @property
    def is_machines(self) -> bool:
        innocent = self.passed or not self.tenants
        return self.over and innocent and not self.repeated and self.convicted is None

    @property
    def convicted(self) -> str | None:
        """The only tenant under suspicion that had requests in flight, if one was sent since it was."""
        present = [tenant for tenant in self.tenants if tenant in self.suspected]
        return present[0] if len(present) == 1 and present[0] and self.tenants[present[0]] else None


@dataclass(slots=True)
class _Suspect:
    """A request that was in flight at losses, and has not passed since.

    Attributes:
        loss: the latest loss.
        age_s: seconds for which it had run then.
        losses: number of losses.
        alone: how many of these found no other request in flight that had been at a loss before.
        until: end of its quarantine.
    """

    loss: _Loss
    age_s: float
    losses: int = 1
    alone: int = 0
    until: float = -inf


class LossJudge:
    """Decides which requests go out after servers were lost. Each method takes the time, of any even clock in seconds.

    Attributes:
        losses: losses of servers so far.
        quarantined: how often a request was put into quarantine.
        cool_downs: how often a tenant began to cool down.
    """

    def __init__(self) -> None:
        self.losses = self.quarantined = self.cool_downs = 0
        self._losses: deque[_Loss] = deque(maxlen=_MOST_LOSSES)
        self._last: dict[str, _Loss] = {}  # by server
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()  # by digest, the latest loss last
        self._suspected: dict[str, tuple[float, float]] = {}  # tenant -> under suspicion since, until
        self._trials: list[Attempt] = []  # of the tenant whose turn it is
        self._convictions: dict[str, list[float]] = {}  # by tenant
        self._cooling: dict[str, float] = {}  # tenant -> until
        self._held_elsewhere: dict[str, float] = {}  # digest, or `tenant_hold` of a tenant -> until

    def refusal(self, now: float, work: Work) -> Refusal | None:
        """Return why a request is not sent now; None if it may be."""
        suspect, shared_holds = self._suspects.get(work.digest), self._held_elsewhere
        until, losses = (-inf, 0) if suspect is None else (suspect.until, suspect.losses)
        until = max(until, shared_holds.get(work.digest, -inf))
        if until > now:
            return Refusal("quarantined", until - now, max(losses, MAX_LOSSES))
        until = max(self._cooling.get(work.tenant, -inf), shared_holds.get(tenant_hold(work.tenant), -inf))
        if until > now:
            convictions = len(self._convictions.get(work.tenant, ()))
            return Refusal("cooling_down", until - now, max(convictions, _MAX_CONVICTIONS))
        return None

    def hold_elsewhere(self, now: float, waits: Mapping[str, float]) -> None:
        """Take over what other gateways hold, in place of what they held before.

        Args:
            waits: digest of a request in quarantine, or `tenant_hold` of a tenant that cools down -> seconds left.
        """
        self._held_elsewhere = {name: now + wait_s for name, wait_s in waits.items()}

    def is_suspect(self, now: float, work: Work) -> bool:
        """Whether a request goes out in its tenant's turn only."""
        return self._trial_s(now, work) is not None

    def may_begin(self, now: float, work: Work) -> bool:
        """Whether a request need not wait for the end of another turn."""
        self._end_turns(now)
        is_others = any(trial.work.party != work.party for trial in self._trials)
        return not is_others or not self.is_suspect(now, work)

    def began(self, now: float, work: Work) -> Attempt:
        """Note that a request is sent. The attempt ends with `passed`, `lost` or `left`."""
        self._end_turns(now)
        attempt = Attempt(work, now)
        if (trial_s := self._trial_s(now, work)) is not None:
            attempt.trial_until = now + trial_s
            turn = [trial.trial_until for trial in self._trials if trial.work.party == work.party]
            # New requests do not make their tenant's turn longer.
            if turn and work.digest not in self._suspects:
                attempt.trial_until = max(turn)
            self._trials.append(attempt)
        return attempt

    def left(self, attempt: Attempt) -> None:
        """Note that an attempt ended neither with an answer nor with the loss of its server."""
        self._end_trial(attempt, survived=False)

    def passed(self, attempt: Attempt) -> bool:
        """Note that an attempt was answered to its end: the request is no suspect any more.

        Returns:
            Whether it was a suspect.
        """
        self._end_trial(attempt, survived=True)
        if suspect := self._suspects.pop(attempt.work.digest, None):
            suspect.loss.passed = True
        return suspect is not None

    def lost(self, now: float, attempt: Attempt, server: str) -> Refusal | None:
        """Note that the server of an attempt was lost.

        Returns:
            The quarantine of the request, if one begins.
        """
        loss, work, began = self._last.get(server), attempt.work, attempt.began
        if loss is None or (loss.over and began > loss.at):
            loss = self._open(now, server)
        self._end_trial(attempt, survived=False)
        if began > loss.at:
            # The server was lost before the request was sent.
            return None
        was_suspected = began > loss.suspected.get(work.tenant, inf)
        if work.tenant not in loss.tenants:
            self._suspected[work.tenant] = loss.at, loss.at + WINDOW_S
        loss.tenants[work.tenant] = loss.tenants.get(work.tenant, False) or was_suspected
        suspect = self._suspects.pop(work.digest, None)
        if suspect is None:
            suspect = _Suspect(loss, loss.at - began)
        elif began > suspect.loss.at:
            attempt.blamed = attempt.trial_until > loss.at or loss.turn in (None, work.party)
            if attempt.blamed:
                suspect.losses += 1
                suspect.loss.repeated.add(work.digest)
                loss.repeated.add(work.digest)
            suspect.loss, suspect.age_s = loss, loss.at - began
        self._suspects[work.digest] = suspect
        if len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.popitem(last=False)
        return self._quarantine(now, suspect) if attempt.blamed else None

    def lost_elsewhere(self, now: float, digest: str, losses: int) -> Refusal | None:
        """Note how many losses several gateways together count of a request that is a suspect here.

        Returns:
            The quarantine of the request, if one begins.
        """
        suspect = self._suspects.get(digest)
        if suspect is None or suspect.losses >= losses:
            return None
        suspect.losses = losses
        suspect.loss.repeated.add(digest)
        return self._quarantine(now, suspect)

    def server_gone(self, now: float, server: str) -> None:
        """Note that a server was found gone, by whatever means."""
        loss = self._last.get(server)
        if loss is None or loss.over:
            self._open(now, server)

    def server_well(self, now: float, server: str) -> None:
        """Note that a server answers, whether it was lost or not."""
        loss = self._last.get(server)
        if loss is not None and not loss.over:
            loss.over = True
            for tenant in loss.tenants.keys() & self._suspected.keys():
                self._suspected[tenant] = self._suspected[tenant][0], now + _SUSPICION_S

    def settle(self, now: float) -> Sequence[CoolDown]:
        """Judge the losses whose requests have reported, and forget what is old.

        Returns:
            The cool-downs that begin.
        """
        self._end_turns(now)
        self._forget(now, now - WINDOW_S)
        begun = []
        for loss in self._losses:
            if not loss.settled and (loss.over or loss.at + _SETTLE_S <= now):
                loss.settled = True
                again = [self._suspects[digest] for digest in loss.repeated if digest in self._suspects]
                if len(loss.repeated) == 1 and again:
                    again[0].alone += 1
                if (tenant := loss.convicted) and (cool_down := self._convict(now, tenant, loss)):
                    begun.append(cool_down)
        return begun

    def _open(self, now: float, server: str) -> _Loss:
        self._end_turns(now)
        suspected = {tenant: since for tenant, (since, until) in self._suspected.items() if until > now}
        turn = self._trials[0].work.party if self._trials else None
        self._last[server] = loss = _Loss(now, suspected, turn)
        self._losses.append(loss)
        self.losses += 1
        return loss

    def _quarantine(self, now: float, suspect: _Suspect) -> Refusal | None:
        """Quarantine a request that was in flight at too many losses, unless it is."""
        if suspect.losses < MAX_LOSSES or suspect.until > now:
            return None
        wait_s = min(_MAX_QUARANTINE_S, _QUARANTINE_S * 4.0 ** min(suspect.alone, 16))
        suspect.until = now + wait_s
        self.quarantined += 1
        return Refusal("quarantined", wait_s, suspect.losses)

    def _trial_s(self, now: float, work: Work) -> float | None:
        """Return the seconds of a request's trial; None if it is no suspect."""
        if (suspect := self._suspects.get(work.digest)) is not None:
            return min(suspect.age_s + 1.0, TURN_S, TURNS_S / len(suspect.loss.tenants))
        if work.tenant in self._suspected and self._holds_back(now):
            return min(TURN_S, TURNS_S / len(self._suspected))
        return None

    def _holds_back(self, now: float) -> bool:
        """Whether new requests of tenants under suspicion wait for their turns, too."""
        recent = (loss for loss in self._losses if now - loss.at < WINDOW_S)
        return sum(not loss.is_machines for loss in recent) >= 2

    def _end_turns(self, now: float) -> None:
        for attempt in self._trials.copy():
            if attempt.trial_until <= now:
                self._end_trial(attempt, survived=True)

    def _end_trial(self, attempt: Attempt, *, survived: bool) -> None:
        """`survived`: the last trial of its tenant ends the suspicion."""
        tenant = attempt.work.tenant
        if attempt in self._trials:
            self._trials.remove(attempt)
            if survived and not any(trial.work.tenant == tenant for trial in self._trials):
                self._suspected.pop(tenant, None)

    def _convict(self, now: float, tenant: str, loss: _Loss) -> CoolDown | None:
        convictions = self._convictions.setdefault(tenant, [])
        convictions.append(loss.at)
        more = len(convictions) - _MAX_CONVICTIONS
        machines = sum(other.is_machines for other in self._losses)
        is_alone = all(other.tenants.keys() <= {tenant} for other in self._losses)
        if more < 0 or len(convictions) <= machines or is_alone:
            return None
        wait_s = min(MAX_COOL_DOWN_S, _COOL_DOWN_S * 2.0 ** min(more, 16))
        self._cooling[tenant] = now + wait_s
        self.cool_downs += 1
        return CoolDown(tenant, wait_s, len(convictions))

    def _forget(self, now: float, before: float) -> None:
        while self._losses and self._losses[0].at < before:
            self._losses.popleft()
        self._last = {server: loss for server, loss in self._last.items() if loss.at >= before}
        while self._suspects:
            digest, suspect = next(iter(self._suspects.items()))
            if max(suspect.loss.at, suspect.until) >= before:
                break
            del self._suspects[digest]
        self._suspected = {tenant: span for tenant, span in self._suspected.items() if span[1] > now}
        for tenant in list(self._convictions):
            recent = self._convictions[tenant] = [at for at in self._convictions[tenant] if at >= before]
            if not recent and self._cooling.get(tenant, -inf) <= now:
                del self._convictions[tenant]
                self._cooling.pop(tenant, None)
