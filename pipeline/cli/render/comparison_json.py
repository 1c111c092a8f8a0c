"""A comparison as values for JSON: `pipeline plan --compare --json`; its schema is printed with --schema.

Keys are only added within a `schema`. Figures have four digits, since more would pretend.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter

from pipeline.plan.performance.accuracy import Estimate, four_digits, interval_estimate, rate_estimate
from pipeline.plan.performance.compare import Comparison, DeploymentOption, FrontPoint
from pipeline.plan.performance.service import LoadPoint

SCHEMA = 2  # 2: ends of an estimate may be null, and first tokens under load have none


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Requests at a time, and what they see."""

    requests: int
    ttft_p95_ms: float  # a queueing formula: nobody knows how far off
    itl_ms: Estimate
    itl_p95_ms: float
    tokens_per_s: Estimate  # output, of all GPUs
    user_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class CostRow:
    """In the currency of --price, for a million tokens."""

    per_million_output: Estimate  # with everything charged to the answers
    input_part: float  # with prompts charged for the time that they take
    output_part: float


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One deployment; `load` and what follows are null where it does not serve, and `reasons` say why."""

    label: str
    gpu: str
    gpus: int
    tensor_parallel: int
    format: str
    kv_cache: str
    draft: bool
    sequences: int  # of the recipe's longest that memory holds
    unverified_rates: bool  # peak rates of the GPU without a source at hand
    reasons: list[str]
    unchecked: list[str]  # what of it no published figure is of, so that its estimates have no ends
    load: LoadRow | None  # the largest within the SLO
    ended_by: Literal["memory", "steps", "ttft", "itl"] | None
    gpu_seconds_per_million_output: Estimate | None
    cost: CostRow | None


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """A point of the front, the quickest first."""

    label: str
    load: LoadRow
    spent: Estimate  # in `unit`, for a million output tokens


@dataclass(frozen=True, slots=True)
class SloRow:
    """The recipe's."""

    ttft_p95_ms: float | None
    itl_p95_ms: float | None


@dataclass(frozen=True, slots=True)
class ComparisonDocument:
    """The whole."""

    schema: int
    recipe: str
    prompt_tokens: int
    output_tokens: int
    acceptance: float | None
    slo: SloRow
    unit: Literal["price", "gpu_seconds"]  # what is ranked by
    serving: list[OptionRow]  # the best first
    refused: list[OptionRow]
    front: list[PlaceRow]
    warnings: list[str]


def comparison_text(found: Comparison) -> str:
    """As JSON."""
    return json.dumps(asdict(comparison_document(found)), indent=2)


def schema_text() -> str:
    """The JSON schema of that."""
    return json.dumps(TypeAdapter(ComparisonDocument).json_schema(), indent=2)


def comparison_document(found: Comparison) -> ComparisonDocument:
    """The values."""
    question, slo = found.question, found.recipe.slo
    return ComparisonDocument(
        schema=SCHEMA,
        recipe=found.recipe.name,
        prompt_tokens=question.work.prompt_tokens,
        output_tokens=question.work.output_tokens,
        acceptance=question.acceptance,
        slo=SloRow(slo.ttft_p95_ms, slo.itl_p95_ms),
        unit="price" if question.priced else "gpu_seconds",
        serving=[_option(option) for option in found.serving],
        refused=[_option(option) for option in found.refused],
        front=[_place(place) for place in found.front],
        warnings=list(found.warnings),
    )


def _option(option: DeploymentOption) -> OptionRow:
    load, cost, seen, checked = option.best, option.cost, option.forecast, not option.unchecked
    serves = load is not None
    return OptionRow(
        label=option.label,
        gpu=option.gpu,
        gpus=option.gpus,
        tensor_parallel=option.tensor_parallel,
        format=option.form,
        kv_cache=option.kv_cache,
        draft=option.draft,
        sequences=option.sequences,
        unverified_rates=option.unverified,
        reasons=list(option.reasons),
        unchecked=list(option.unchecked),
        load=_load(load, checked=checked) if load is not None else None,
        ended_by=seen.ended_by if serves and seen is not None else None,
        gpu_seconds_per_million_output=interval_estimate(option.gpu_seconds, checked=checked).shortened()
        if serves
        else None,
        cost=CostRow(
            interval_estimate(cost.per_million_output, checked=checked).shortened(),
            four_digits(cost.input_part),
            four_digits(cost.output_part),
        )
        if cost is not None and serves
        else None,
    )


def _load(load: LoadPoint, *, checked: bool) -> LoadRow:
    return LoadRow(
        requests=load.batch,
        ttft_p95_ms=four_digits(load.ttft_ms),
        itl_ms=interval_estimate(load.itl_ms, checked=checked).shortened(),
        itl_p95_ms=four_digits(load.itl_p95_ms),
        tokens_per_s=rate_estimate(load.tokens_per_s, checked=checked).shortened(),
        user_tokens_per_s=four_digits(load.user_tokens_per_s),
    )


def _place(place: FrontPoint) -> PlaceRow:
    spent = interval_estimate(place.spent, checked=place.checked).shortened()
    return PlaceRow(place.option.label, _load(place.load, checked=place.checked), spent)
