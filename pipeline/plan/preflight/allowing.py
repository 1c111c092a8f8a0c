"""Errors that a user lets pass, by the ids of their rules (`--allow RULE`), and what manifests keep of findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeline.contracts.rules import nearest, rules
from pipeline.errors import Fault, InvalidInput
from pipeline.plan.preflight.finding import Finding
from pipeline.store import Json
from pipeline.store.manifest import FINDINGS

ALLOWABLE = frozenset(one.id for one in rules() if not one.never_allowed)


def allowance(names: Iterable[str]) -> frozenset[str]:
    """The ids, checked.

    Raises:
        InvalidInput: with every id that is none, or that the data forbids to allow.
    """
    wanted, known = frozenset(names), {one.id: one for one in rules()}
    faults: list[Fault] = []
    for name in sorted(wanted):
        if name not in known:
            near = ", ".join(nearest(name))
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
    """The findings, with those errors marked that are let pass."""
    return tuple(
        replace(one, allowed=True) if one.severity == "error" and one.rule in allowed & ALLOWABLE else one
        for one in found
    )


def kept(found: Sequence[Finding]) -> dict[str, Json]:
    """What the manifest of an engine or a package says of them: warnings, and errors that were allowed."""
    worth = [one for one in found if one.severity == "warning" or one.allowed]
    records: list[Json] = [
        {"rule": one.rule, "severity": one.severity, "allowed": one.allowed, "text": str(one)}
        for one in worth
    ]
    return {FINDINGS: records} if records else {}


def said(found: Sequence[Finding]) -> list[str]:
    """A line for each warning, and each error that was allowed."""
    return [f"{one.mark}: {one} [{one.rule}]" for one in found if one.severity == "warning" or one.allowed]
