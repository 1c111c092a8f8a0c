"""An outlook as a page for people, or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pipeline.cli.render.bars import Look
from pipeline.cli.render.memory import alternative_lines, memory_lines
from pipeline.cli.render.speed import forecast_lines
from pipeline.cli.render.tables import marked, step_lines
from pipeline.plan.report import PlanReport
from pipeline.prepare.report_json import document_of
from pipeline.store import Store


def page(outlook: PlanReport, store: Store, until: str, look: Look) -> str:
    """Verdict first, then what it rests on."""
    return "\n".join(line.rstrip() for line in _lines(outlook, store, until, look))


def document(outlook: PlanReport, store: Store, until: str) -> str:
    """The same as JSON."""
    return json.dumps(document_of(outlook, store, until).as_json(), indent=2)


def _lines(outlook: PlanReport, store: Store, until: str, look: Look) -> Iterator[str]:
    yield f"{outlook.recipe.name}, runtime {outlook.recipe.runtime.kind}, store {store.root}"
    yield outlook.verdict
    for role, what in outlook.seen.items():
        yield f"{role}: {what}"
    yield ""
    if outlook.plan is not None:
        yield from step_lines(outlook.plan, store, until)
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
