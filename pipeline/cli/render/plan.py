"""Output of `pipeline plan` and of a dry build: for people, or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from pipeline.cli.render.memory import OutputStyle, alternative_lines, memory_lines
from pipeline.cli.render.speed import forecast_lines
from pipeline.plan.plan import Plan
from pipeline.plan.preflight import Finding
from pipeline.prepare import step_states
from pipeline.prepare.report import PlanReport
from pipeline.prepare.report_json import document_of, step_rows
from pipeline.store import Artifact, Store, human_bytes


def page(outlook: PlanReport, store: Store, look: OutputStyle) -> str:
    """Render the report of a plan: the verdict first, then its grounds."""
    return "\n".join(line.rstrip() for line in _lines(outlook, store, look))


def document(outlook: PlanReport, store: Store) -> str:
    """Render the report of a plan as JSON."""
    return json.dumps(document_of(outlook, store).as_json(), indent=2)


def _lines(outlook: PlanReport, store: Store, look: OutputStyle) -> Iterator[str]:
    yield f"{outlook.recipe.name}, runtime {outlook.recipe.runtime.kind}, store {store.root}"
    yield outlook.verdict
    for role, origin in outlook.model_sources.items():
        yield f"{role}: {origin}"
    yield ""
    if outlook.plan is not None:
        yield from step_lines(outlook.plan, store)
    else:
        yield f"steps are not known: {outlook.unknown['plan']}"
    yield ""
    if outlook.memory is not None:
        yield from memory_lines(outlook.memory, look, outlook.doubts)
    else:
        yield f"memory is not known: {outlook.unknown['memory']}"
    if outlook.alternatives:
        yield ""
        yield from alternative_lines(outlook.alternatives)
    if outlook.performance is not None:
        yield ""
        yield outlook.performance.title
        yield ""
        yield from forecast_lines(outlook.performance, look.width)
    elif "performance" in outlook.unknown:
        yield ""
        yield f"speed is not known: {outlook.unknown['performance']}"
    if outlook.findings:
        yield ""
        yield "preflight"
        yield ""
        yield from (f"  {marked(finding)}" for finding in outlook.findings)


def plan_table(plan: Plan, store: Store, until: str, findings: Sequence[Finding] = ()) -> str:
    """Render the steps of a build; `pipeline plan` says more."""
    lines = [f"{plan.recipe.name}, runtime {plan.recipe.runtime.kind}, store {store.root}", ""]
    lines += step_lines(plan, store, until)
    lines += ["", *(f"  {marked(finding)}" for finding in findings)] if findings else []
    return "\n".join(lines)


def plan_json(plan: Plan, store: Store, until: str, findings: Sequence[Finding] = ()) -> str:
    """Render the steps as JSON, with all that each key is made from."""
    rows = [asdict(finding) for finding in findings]
    steps = [asdict(row) for row in step_rows(plan, store, until)]
    return json.dumps(
        {"recipe": plan.recipe.name, "store": str(store.root), "steps": steps, "findings": rows}, indent=2
    )


def step_lines(plan: Plan, store: Store, until: str = "package") -> Iterator[str]:
    """Yield a line for each step: its state, size and artifact."""
    width = max(18, *(len(step.name) + 2 for step in plan))
    yield f"  {'step':<{width}}{'state':<12}{'size':>10}  artifact"
    for step, artifact, needed in step_states(plan, store, until):
        size = human_bytes(artifact.manifest.total_bytes) if artifact else ""
        yield f"  {step.name:<{width}}{_state(artifact, needed):<12}{size:>10}  {step.key.name}"


def marked(finding: Finding) -> str:
    """Write a finding in one line."""
    return f"{'allowed' if finding.allowed else finding.severity}: {finding} [{finding.rule}]"


def _state(artifact: Artifact | None, needed: bool) -> str:
    return "in store" if artifact else ("to make" if needed else "not needed")
