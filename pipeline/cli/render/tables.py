"""A plan as a table for people, or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from pipeline.plan.plan import Plan
from pipeline.plan.preflight import Finding
from pipeline.prepare import step_states
from pipeline.prepare.report_json import step_rows
from pipeline.store import Artifact, Store, human_bytes


def plan_table(plan: Plan, store: Store, until: str, findings: Sequence[Finding] = ()) -> str:
    """What a build would make; `pipeline plan` says more."""
    lines = [f"{plan.recipe.name}, runtime {plan.recipe.runtime.kind}, store {store.root}", ""]
    lines += step_lines(plan, store, until)
    lines += ["", *(f"  {marked(finding)}" for finding in findings)] if findings else []
    return "\n".join(lines)


def plan_json(plan: Plan, store: Store, until: str, findings: Sequence[Finding] = ()) -> str:
    """The same, with all that each key is made from."""
    said = [asdict(finding) for finding in findings]
    steps = [asdict(row) for row in step_rows(plan, store, until)]
    return json.dumps(
        {"recipe": plan.recipe.name, "store": str(store.root), "steps": steps, "findings": said}, indent=2
    )


def step_lines(plan: Plan, store: Store, until: str) -> Iterator[str]:
    """One line a step: what is there, what a build would make, and under which name."""
    yield f"  {'step':<18}{'state':<12}{'size':>10}  artifact"
    for step, artifact, needed in step_states(plan, store, until):
        size = human_bytes(artifact.manifest.total_bytes) if artifact else ""
        yield f"  {step.name:<18}{_state(artifact, needed):<12}{size:>10}  {step.key.name}"


def marked(finding: Finding) -> str:
    """A finding in one line."""
    return f"{'allowed' if finding.allowed else finding.severity}: {finding} [{finding.rule}]"


def _state(artifact: Artifact | None, needed: bool) -> str:
    return "in store" if artifact else ("to make" if needed else "not needed")
