"""An outlook as a page for people, or as JSON for scripts.

JSON, version 1 (`schema`); keys are only added within a version, and what is not known is null:

    recipe, runtime, store     names
    verdict                    text; refused: bool; memory: "fits" | "fits in part" | "does not fit"; meets_slo: bool
    models                     role -> how many weights, and where that is from
    steps                      step, state ("in store" | "to make" | "not needed"), artifact, digest, settings, inputs,
                               tools
    memory                     device, capacity_bytes, fraction, tokens, blocks, block_tokens, sequence_tokens,
                               sequences, max_concurrency, token_bytes (role ->), ranks: rank, used_bytes,
                               headroom_bytes, lines: key, group, role, name, bytes, formula, sources
    alternatives               overrides, verdict, sequences, tokens, gpus, weight_bytes (of the fullest rank)
    performance                see `pipeline.planning.performance`
    findings                   rule, severity, keys, value, problem, reason, fix, sources, allowed
    unknown                    section -> why it is null
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.cli.plan_bars import Look
from pipeline.cli.plan_memory import alternative_lines, memory_lines
from pipeline.cli.tables import marked, step_lines, step_rows
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.outlook import Outlook
from pipeline.store import Store

SCHEMA = 1


def page(outlook: Outlook, store: Store, until: str, look: Look) -> str:
    """Verdict first, then what it rests on."""
    return "\n".join(line.rstrip() for line in _lines(outlook, store, until, look))


def document(outlook: Outlook, store: Store, until: str) -> str:
    """The same as JSON."""
    memory, performance = outlook.memory, outlook.performance
    whole: dict[str, Any] = {
        "schema": SCHEMA,
        "recipe": outlook.recipe.name,
        "runtime": outlook.recipe.runtime.kind,
        "store": str(store.root),
        "verdict": {
            "text": outlook.verdict,
            "refused": outlook.refused,
            "memory": memory.verdict if memory is not None else None,
            "meets_slo": outlook.meets_slo,
        },
        "models": dict(outlook.seen),
        "steps": step_rows(outlook.plan, store, until) if outlook.plan is not None else None,
        "memory": _memory(memory) if memory is not None else None,
        "alternatives": [_alternative(one.overrides, one.plan) for one in outlook.alternatives],
        "performance": dict(performance.as_json()) if performance is not None else None,
        "findings": [asdict(finding) for finding in outlook.findings],
        "unknown": dict(outlook.unknown),
    }
    return json.dumps(whole, indent=2)


def _lines(outlook: Outlook, store: Store, until: str, look: Look) -> Iterator[str]:
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
        yield from memory_lines(outlook.memory, look)
    else:
        yield f"memory is not known: {outlook.unknown['memory']}"
    if outlook.alternatives:
        yield ""
        yield from alternative_lines(outlook.alternatives)
    if outlook.performance is not None:
        yield ""
        yield outlook.performance.title
        yield ""
        yield from outlook.performance.lines(look.width)
    if outlook.findings:
        yield ""
        yield "preflight"
        yield ""
        yield from (f"  {marked(finding)}" for finding in outlook.findings)


def _memory(memory: MemoryPlan) -> dict[str, Any]:
    demand = memory.demand
    return {
        "device": demand.device,
        "capacity_bytes": demand.capacity,
        "fraction": demand.fraction if demand.is_gpu else None,
        "tokens": memory.tokens,
        "blocks": memory.blocks,
        "block_tokens": memory.block_tokens,
        "sequence_tokens": demand.sequence_tokens,
        "sequences": memory.sequences,
        "max_concurrency": demand.concurrency,
        "token_bytes": memory.token_bytes,
        "ranks": [
            {
                "rank": rank.index,
                "used_bytes": rank.used,
                "headroom_bytes": rank.headroom,
                "lines": [{"key": line.key, **asdict(line)} for line in rank.lines],
            }
            for rank in memory.ranks
        ],
    }


def _alternative(overrides: tuple[str, ...], plan: MemoryPlan) -> dict[str, Any]:
    return {
        "overrides": list(overrides),
        "verdict": plan.verdict,
        "sequences": plan.sequences,
        "tokens": plan.tokens,
        "gpus": len(plan.ranks),
        "weight_bytes": max(rank.group("weights") for rank in plan.ranks),
    }
