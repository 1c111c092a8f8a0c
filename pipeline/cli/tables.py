"""A plan as a table for people, or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from pipeline.planning.plan import Plan
from pipeline.planning.preflight import Finding
from pipeline.stages import demanded
from pipeline.store import Store, human_bytes


def plan_table(plan: Plan, store: Store, until: str, findings: Sequence[Finding] = ()) -> str:
    """One line a step: what is there, what a build would make, and under which name."""
    lines = [f"{plan.recipe.name}, runtime {plan.recipe.runtime.kind}, store {store.root}", ""]
    lines.append(f"  {'step':<18}{'state':<12}{'size':>10}  artifact")
    for step, artifact, needed in demanded(plan, store, until):
        state = "in store" if artifact else ("to make" if needed else "not needed")
        size = human_bytes(artifact.manifest.total_bytes) if artifact else ""
        lines.append(f"  {step.name:<18}{state:<12}{size:>10}  {step.key.name}")
    lines += ["", *(f"  {_marked(finding)}" for finding in findings)] if findings else []
    return "\n".join(lines)


def plan_json(plan: Plan, store: Store, until: str, findings: Sequence[Finding] = ()) -> str:
    """The same, with all that each key is made from."""
    steps = [
        {
            "step": step.name,
            "state": "in store" if artifact else ("to make" if needed else "not needed"),
            "artifact": step.key.name,
            "digest": step.key.digest,
            "settings": step.key.settings,
            "inputs": dict(step.inputs),
            "tools": step.key.tools,
        }
        for step, artifact, needed in demanded(plan, store, until)
    ]
    said = [asdict(finding) for finding in findings]
    whole = {"recipe": plan.recipe.name, "store": str(store.root), "steps": steps, "findings": said}
    return json.dumps(whole, indent=2)


def _marked(finding: Finding) -> str:
    return f"{'allowed' if finding.allowed else finding.severity}: {finding} [{finding.rule}]"
