"""An outlook as values for JSON: `pipeline plan --json`, whose schema `pipeline recipes schema plan` prints.

Keys are only added within a `schema`; what is not known is null, and `unknown` says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from pipeline.plan.memory import Alternative, MemoryLine, MemoryPlan, RankMemory
from pipeline.plan.plan import Plan
from pipeline.plan.preflight import Finding
from pipeline.prepare.prepare import step_states
from pipeline.prepare.report import PlanReport
from pipeline.store import Store

SCHEMA = 2  # 2: ends of an estimate may be null
Fit = Literal["fits", "fits in part", "does not fit"]
State = Literal["in store", "to make", "not needed"]


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """The verdict in one sentence, and in values."""

    text: str
    refused: bool  # the exit code is then 2
    memory: Fit | None
    meets_slo: bool | None


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the plan that a build executes."""

    step: str
    state: State
    artifact: str
    digest: str
    settings: dict[str, Any]  # all that the artifact's key is made from
    inputs: dict[str, str]
    tools: dict[str, str]


@dataclass(frozen=True, slots=True)
class LineRow:
    """One figure of a rank, in bytes."""

    key: str  # "weights.target.attention"
    group: str
    role: str  # "target" | "draft" | ""
    name: str
    bytes: int
    formula: str
    sources: list[str]


@dataclass(frozen=True, slots=True)
class RankRow:
    """One GPU, or the memory of this machine."""

    rank: int
    used_bytes: int
    headroom_bytes: int
    lines: list[LineRow]  # in load order


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """All ranks, and what their KV caches hold."""

    device: str
    capacity_bytes: int  # of one GPU
    fraction: float | None  # of what is left, for KV caches; null on cpu
    tokens: int  # in the KV cache of each model
    blocks: int
    block_tokens: int
    request_groups: int  # ranks of a stage that each have requests, and so many tokens, of their own
    fullest_ranks: list[int]  # that have room for the fewest tokens
    sequence_tokens: int  # prompt, answer and drafts of one request at the recipe's limits
    sequences: int  # of that length, at a time
    max_concurrency: int  # that the recipe wants
    token_bytes: dict[str, int]  # role -> of one token on a rank
    ranks: list[RankRow]


@dataclass(frozen=True, slots=True)
class AlternativeRow:
    """A change that holds more."""

    overrides: list[str]  # of the recipe, for --set
    verdict: Fit
    sequences: int
    tokens: int
    gpus: int
    weight_bytes: int  # of the fullest rank


@dataclass(frozen=True, slots=True)
class OutlookDocument:
    """The document that `pipeline plan --json` prints."""

    schema: int
    recipe: str
    runtime: str
    store: str
    verdict: VerdictRow
    models: dict[str, str]  # role -> how many weights, and where that is from
    steps: list[StepRow] | None
    memory: MemoryRow | None
    alternatives: list[AlternativeRow]
    performance: dict[str, Any] | None
    findings: list[Finding]
    warnings: list[str]  # what of the figures was compared with nothing
    unknown: dict[str, str]  # "plan" | "memory" | "performance" -> why it is null

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        document: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return document


def document_of(outlook: PlanReport, store: Store) -> OutlookDocument:
    """The same as values."""
    memory, performance = outlook.memory, outlook.performance
    return OutlookDocument(
        schema=SCHEMA,
        recipe=outlook.recipe.name,
        runtime=outlook.recipe.runtime.kind,
        store=str(store.root),
        verdict=VerdictRow(
            outlook.verdict, outlook.refused, memory.verdict if memory else None, outlook.meets_slo
        ),
        models=dict(outlook.model_sources),
        steps=step_rows(outlook.plan, store) if outlook.plan is not None else None,
        memory=_memory(memory) if memory is not None else None,
        alternatives=[_alternative(alternative) for alternative in outlook.alternatives],
        performance=dict(performance.as_json()) if performance is not None else None,
        findings=list(outlook.findings),
        warnings=list(outlook.warnings),
        unknown=dict(outlook.unknown),
    )


def step_rows(plan: Plan, store: Store, until: str = "package") -> list[StepRow]:
    """The steps with all that their keys are made from."""
    return [
        StepRow(
            step=step.name,
            state="in store" if artifact else ("to make" if needed else "not needed"),
            artifact=step.key.name,
            digest=step.key.digest,
            settings=dict(step.key.settings),
            inputs=dict(step.inputs),
            tools=dict(step.key.tools),
        )
        for step, artifact, needed in step_states(plan, store, until)
    ]


def schema_text() -> str:
    """JSON schema of the document."""
    return json.dumps(_adapter().json_schema(mode="serialization"), indent=2, sort_keys=True) + "\n"


def _memory(memory: MemoryPlan) -> MemoryRow:
    demand = memory.spec
    return MemoryRow(
        device=demand.device,
        capacity_bytes=demand.capacity,
        fraction=demand.fraction if demand.is_gpu else None,
        tokens=memory.tokens,
        blocks=memory.blocks,
        block_tokens=memory.block_tokens,
        request_groups=demand.request_groups,
        fullest_ranks=list(memory.fullest),
        sequence_tokens=demand.sequence_tokens,
        sequences=memory.sequences,
        max_concurrency=demand.concurrency,
        token_bytes=dict(memory.token_bytes),
        ranks=[_rank(rank) for rank in memory.ranks],
    )


def _rank(rank: RankMemory) -> RankRow:
    return RankRow(rank.index, rank.used, rank.headroom, [_line(line) for line in rank.lines])


def _line(line: MemoryLine) -> LineRow:
    return LineRow(line.key, line.group, line.role, line.name, line.bytes, line.formula, list(line.sources))


def _alternative(alternative: Alternative) -> AlternativeRow:
    plan = alternative.plan
    return AlternativeRow(
        overrides=list(alternative.overrides),
        verdict=plan.verdict,
        sequences=plan.sequences,
        tokens=plan.tokens,
        gpus=len(plan.ranks),
        weight_bytes=max(rank.group("weights") for rank in plan.ranks),
    )


@cache
def _adapter() -> TypeAdapter[OutlookDocument]:
    return TypeAdapter(OutlookDocument)
