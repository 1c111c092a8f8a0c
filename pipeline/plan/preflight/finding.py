"""Objections of checks, findings of rules, and errors that a user lets pass (`--allow RULE`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.contracts.rules import Severity, rules, similar_ids
from pipeline.errors import Fault, InvalidInput
from pipeline.plan.preflight.context import Context
from pipeline.store import Json
from pipeline.store.manifest import FINDINGS


@dataclass(frozen=True, slots=True)
class Objection:
    """One objection of a check. Severity and sources are the rule's, unless given."""

    keys: tuple[str, ...]  # of the recipe, the one to change first
    problem: str
    fix: str = ""
    severity: Severity | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that speaks against a recipe, its models or a machine."""

    rule: str  # its id in contracts/data/rules
    severity: Severity
    keys: tuple[str, ...]  # of the recipe, the one to change first; or what of the machine: "machine.driver"
    value: object  # what the recipe says for the first of them; None: nothing
    problem: str
    reason: str  # why upstream, or we, have the rule
    fix: str
    sources: tuple[str, ...]
    allowed: bool = False  # an error that --allow lets pass

    @property
    def stops(self) -> bool:
        """Whether it refuses the recipe."""
        return self.severity == "error" and not self.allowed

    @property
    def mark(self) -> str:
        """How it is listed: its severity, or "allowed"."""
        return "allowed" if self.allowed else self.severity

    def __str__(self) -> str:
        given = "" if self.value is None or isinstance(self.value, dict) else f" = {self.value}"
        text = f"{self.keys[0]}{given}: {self.problem}"
        return f"{text} ({self.fix})" if self.fix else text


Check = Callable[[Context], Iterator[Objection]]


ALLOWABLE = frozenset(one.id for one in rules() if not one.never_allowed)


def check_allowed(names: Iterable[str]) -> frozenset[str]:
    """Check the ids of `--allow`.

    Args:
        names: Ids of rules, as the user gives them; one may come twice.

    Raises:
        InvalidInput: with every id that does not exist, or that the data forbids to allow.
    """
    wanted, known = frozenset(names), {one.id: one for one in rules()}
    faults: list[Fault] = []
    for name in sorted(wanted):
        if name not in known:
            near = ", ".join(similar_ids(name))
            fix = f"did you mean {near}?" if near else "pipeline rules lists them"
            faults.append(Fault("there is no such rule", key="--allow", value=name, fix=fix))
        elif known[name].never_allowed:
            faults.append(
                Fault(f"may not be allowed: {known[name].never_allowed}", key="--allow", value=name)
            )
    if faults:
        raise InvalidInput("--allow", faults)
    return wanted


def allow(found: Sequence[Finding], allowed: frozenset[str]) -> tuple[Finding, ...]:
    """Mark the errors among findings that a user lets pass; rules that may never be allowed are not marked."""
    return tuple(
        replace(one, allowed=True) if one.severity == "error" and one.rule in allowed & ALLOWABLE else one
        for one in found
    )


def manifest_findings(found: Sequence[Finding]) -> dict[str, Json]:
    """Records of warnings and allowed errors for the manifest of an engine or a package; empty if there are none."""
    worth = [one for one in found if one.severity == "warning" or one.allowed]
    records: list[Json] = [
        {"rule": one.rule, "severity": one.severity, "allowed": one.allowed, "text": str(one)}
        for one in worth
    ]
    return {FINDINGS: records} if records else {}


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """Write a line for each warning, and each error that was allowed, with the id of its rule at the end."""
    return [f"{one.mark}: {one} [{one.rule}]" for one in found if one.severity == "warning" or one.allowed]
