"""Output of `pipeline plan compare`: a table, or JSON (whose schema `pipeline recipes schema comparison` prints).

Keys are only added within a `schema`. Figures have four digits, since more would pretend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter

from pipeline.cli.render.speed import basis, number, wrapped
from pipeline.plan.performance.compare import Comparison, DeploymentOption, FrontPoint
from pipeline.plan.performance.estimates import Estimate, four_digits
from pipeline.plan.performance.forecast import Forecast
from pipeline.plan.performance.service import LoadPoint

_WIDTH = 110  # of running text
_ENDS = {"memory": "memory", "limits": "memory", "ttft": "first token", "itl": "between tokens"}


def comparison_lines(comparison: Comparison, *, rows: int) -> Iterator[str]:
    """Yield the best options, so many of them, and why the others do not serve."""
    question = comparison.question
    work, slo = question.work, comparison.recipe.slo
    limits = [
        f"{name} at most {value:g} ms"
        for name, value in (("first token p95", slo.ttft_p95_ms), ("between tokens p95", slo.itl_p95_ms))
        if value is not None
    ]
    yield f"{comparison.recipe.name}: prompts of {work.prompt_tokens} and answers of {work.output_tokens} tokens"
    ranked_by = _measure(comparison)
    yield f"SLO: {', '.join(limits) or 'none'}; ranked by {ranked_by}, at the most requests within it"
    if question.acceptance is not None:
        yield f"drafts: {question.acceptance:g} of their tokens are accepted"
    elif comparison.recipe.draft is not None:
        yield "without its draft: --acceptance, the share of its tokens that is accepted, compares it too"
    yield ""
    yield from _table(comparison, rows)
    yield from _refused(comparison.refused)
    yield ""
    yield from notes(comparison, _WIDTH)
    if any(option.unverified for option in comparison.serving):
        yield "  ?: peak rates of this GPU without a source at hand (contracts/data/gpus.yaml)"


def notes(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield how sure the figures are, and which are unchecked."""
    yield from basis(width)
    for warning in comparison.warnings:
        yield from wrapped(f"warning: {warning}", width)


def place_label(place: FrontPoint) -> str:
    """`2 x h100-sxm-80g fp8, 16 requests`."""
    return f"{place.option.label}, {place.load.batch} request{'s' if place.load.batch > 1 else ''}"


def measure_label(comparison: Comparison) -> str:
    """Name of the axis of costs."""
    unit = "price" if comparison.question.priced else "GPU-seconds"
    return f"{unit} of a million output tokens"


def spent(option: DeploymentOption, comparison: Comparison) -> Estimate:
    """Cost of a million output tokens at the largest load."""
    assert option.forecast is not None, "it serves"
    if comparison.question.priced and option.cost is not None:
        return option.forecast.interval(option.cost.per_million_output)
    return option.forecast.interval(option.gpu_seconds)


def _measure(comparison: Comparison) -> str:
    return "price" if comparison.question.priced else "GPU time (give --price GPU=PER_HOUR to rank by money)"


def _table(comparison: Comparison, rows: int) -> Iterator[str]:
    if not comparison.serving:
        yield "  nothing serves a single request within the SLO"
        return
    best = {id(place.option) for place in comparison.front}
    head = "price / 1M out" if comparison.question.priced else "GPU-s / 1M out"
    yield (
        f"     {'deployment':<38}{'requests':>8}  {'ended by':<15}{'TTFT p95':>9}{'ITL':>8}{'tokens/s':>10}"
        f"{'a GPU':>8}{head:>16}"
    )
    for index, option in enumerate(comparison.serving):
        if index < rows or id(option) in best:
            yield _row(index, option, comparison, on_front=id(option) in best)
    hidden = sum(1 for option in comparison.serving[rows:] if id(option) not in best)
    if hidden:
        yield f"     … and {hidden} more that serve (--json has all)"
    yield "  *: on the front of time between tokens and what a token takes, at one load or another"


def _row(index: int, option: DeploymentOption, comparison: Comparison, *, on_front: bool) -> str:
    load = option.best
    assert load is not None, "it serves"
    assert option.forecast is not None, "it serves"
    label = option.label + (" ?" if option.unverified else "")
    taken = spent(option, comparison)
    return (
        f"{index + 1:>3}{'*' if on_front else ' '} {label:<38}{load.batch:>8}  {_ENDS[option.forecast.ended_by]:<15}"
        f"{number(load.ttft_ms):>6} ms{number(load.itl_ms):>5} ms{number(load.tokens_per_s):>10}"
        f"{number(load.tokens_per_s / option.gpus):>8}"
        f"{number(taken.value):>8}{_ends(taken)}"
    )


def _ends(taken: Estimate) -> str:
    if taken.low is None or taken.high is None:
        return ""
    return f" ({number(taken.low)}-{number(taken.high)})"


def _refused(options: Sequence[DeploymentOption]) -> Iterator[str]:
    """Yield the options that do not serve, grouped by reason."""
    groups: dict[str, list[str]] = {}
    for option in options:
        for reason in option.reasons:
            groups.setdefault(_kind(reason), []).append(option.label)
    if groups:
        yield ""
        yield f"  {len(options)} that do not serve (--json says which and why, one by one):"
    for reason, labels in groups.items():
        named = ", ".join(labels[:3]) + (f", … ({len(labels)} in all)" if len(labels) > 3 else "")
        yield f"    {reason}: {named}"


def _kind(reason: str) -> str:
    if reason.startswith("not one sequence"):
        return "do not fit into memory"
    if reason.startswith("first token after"):
        return "first token too late, even alone"
    if "between tokens even alone" in reason:
        return "too slow between tokens, even alone"
    return reason


SCHEMA = 2  # 2: ends of an estimate may be null, and first tokens under load have none


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Figures with so many requests at a time."""

    requests: int
    ttft_p95_ms: float  # simulated; no measurement checks it
    itl_ms: Estimate
    itl_p95_ms: float
    tokens_per_s: Estimate  # output, of all GPUs
    user_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class CostRow:
    """Price of a million tokens, in the currency of --price."""

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
    unchecked: list[str]  # parts that no measurement is of, so that estimates have no ends
    load: LoadRow | None  # the largest within the SLO
    ended_by: Literal["memory", "limits", "ttft", "itl"] | None
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
    """SLO of the recipe."""

    ttft_p95_ms: float | None
    itl_p95_ms: float | None


@dataclass(frozen=True, slots=True)
class ComparisonDocument:
    """The whole document."""

    schema: int
    recipe: str
    prompt_tokens: int
    output_tokens: int
    acceptance: float | None
    slo: SloRow
    unit: Literal["price", "gpu_seconds"]  # figure of the ranking
    serving: list[OptionRow]  # those that measurements check first, and of them the best
    refused: list[OptionRow]
    front: list[PlaceRow]
    warnings: list[str]


def comparison_text(comparison: Comparison) -> str:
    """Write a comparison as JSON."""
    return json.dumps(asdict(comparison_document(comparison)), indent=2)


def schema_text() -> str:
    """JSON schema of `comparison_text`."""
    return json.dumps(TypeAdapter(ComparisonDocument).json_schema(), indent=2) + "\n"


def comparison_document(comparison: Comparison) -> ComparisonDocument:
    """Make the document of a comparison."""
    question, slo = comparison.question, comparison.recipe.slo
    return ComparisonDocument(
        schema=SCHEMA,
        recipe=comparison.recipe.name,
        prompt_tokens=question.work.prompt_tokens,
        output_tokens=question.work.output_tokens,
        acceptance=question.acceptance,
        slo=SloRow(slo.ttft_p95_ms, slo.itl_p95_ms),
        unit="price" if question.priced else "gpu_seconds",
        serving=[_option_row(option) for option in comparison.serving],
        refused=[_option_row(option) for option in comparison.refused],
        front=[_place_row(place) for place in comparison.front],
        warnings=list(comparison.warnings),
    )


def _option_row(option: DeploymentOption) -> OptionRow:
    load, cost, forecast = option.best, option.cost, option.forecast
    serves = load is not None and forecast is not None
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
        load=_load_row(load, forecast) if load is not None and forecast is not None else None,
        ended_by=forecast.ended_by if serves and forecast is not None else None,
        gpu_seconds_per_million_output=forecast.interval(option.gpu_seconds).shortened()
        if serves and forecast is not None
        else None,
        cost=CostRow(
            forecast.interval(cost.per_million_output).shortened(),
            four_digits(cost.input_part),
            four_digits(cost.output_part),
        )
        if cost is not None and serves and forecast is not None
        else None,
    )


def _load_row(load: LoadPoint, forecast: Forecast) -> LoadRow:
    return LoadRow(
        requests=load.batch,
        ttft_p95_ms=four_digits(load.ttft_ms),
        itl_ms=forecast.estimate("tpot", load.itl_ms).shortened(),
        itl_p95_ms=four_digits(load.itl_p95_ms),
        tokens_per_s=forecast.estimate("throughput", load.tokens_per_s).shortened(),
        user_tokens_per_s=four_digits(load.user_tokens_per_s),
    )


def _place_row(place: FrontPoint) -> PlaceRow:
    forecast = place.option.forecast
    assert forecast is not None, "it serves"
    spent = forecast.interval(place.spent).shortened()
    return PlaceRow(place.option.label, _load_row(place.load, forecast), spent)
