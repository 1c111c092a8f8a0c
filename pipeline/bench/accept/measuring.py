"""Steps that measure: latency alone and under load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.bench.accept.judging import expect, held_to_forecast, slo_checks
from pipeline.bench.accept.report import AcceptanceCheck
from pipeline.bench.accept.state import TIMEOUT_S, AcceptanceRun, Checks
from pipeline.bench.load import Period
from pipeline.bench.result import LevelResult
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.client import Sampling
from pipeline.plan.performance.accuracy import Estimate, interval_estimate, rate_estimate, unchecked

_LEVEL_S = 120.0  # in which streams of one load begin requests


def latency(run: AcceptanceRun) -> Checks:
    """Time to the first token and between tokens of one request alone, against the plan's forecast."""
    level = _load(run, 1, max(8, run.settings.load.rounds), run.undrafted)
    run.figures["alone"] = figures = _figures(level)
    yield from _no_fault(level)
    if not figures["requests"]:
        return
    forecast = run.plan.performance if run.plan is not None else None
    first, alone = (forecast.ttft_ms, forecast.itl_ms) if forecast else (None, None)
    yield held_to_forecast("first token alone, median", figures["ttft_p50_ms"], first, "ms")
    yield held_to_forecast("time between tokens alone, mean", figures["tpot_ms"], alone, "ms")


def load(run: AcceptanceRun) -> Checks:
    """Streams at a time up to limits.max_concurrency, against the plan's forecast and the recipe's SLO."""
    most = run.deployment.limits.max_concurrency
    forecast = run.plan.performance if run.plan is not None else None
    points = {point.batch: point for point in forecast.curve} if forecast is not None else {}
    levels = sorted({2**power for power in range(1, most.bit_length()) if 2**power < most} | {most})
    measured = []
    for streams in levels:
        level = _load(run, streams, run.settings.load.rounds, run.undrafted)
        measured.append(figures := _figures(level))
        yield from _no_fault(level)
        if not figures["requests"]:
            continue
        point, checked = points.get(streams), _is_checked(run, streams)
        known = point is not None
        yield held_to_forecast(
            f"tokens a second, {streams} streams",
            figures["tokens_per_s"],
            rate_estimate(point.tokens_per_s, checked=checked) if known and point else None,
            "tokens/s",
            less_is_better=False,
        )
        yield held_to_forecast(
            f"time between tokens, {streams} streams, mean",
            figures["tpot_ms"],
            interval_estimate(point.itl_ms, checked=checked) if known and point else None,
            "ms",
        )
        yield held_to_forecast(
            f"first token, {streams} streams, p95",
            figures["ttft_p95_ms"],
            Estimate(point.ttft_ms) if known and point else None,
            "ms",
        )
    as_deployed = figures
    if run.separate_draft:
        level = _load(run, most, run.settings.load.rounds, {})
        run.figures["with_draft"] = as_deployed = _figures(level)
        yield from _no_fault(level)
        gain = as_deployed["tokens_per_s"] / figures["tokens_per_s"] if figures["tokens_per_s"] else 0.0
        yield AcceptanceCheck(
            f"tokens a second with the draft, {most} streams",
            "measured",
            "",
            f"{as_deployed['tokens_per_s']:,.0f} tokens/s, {gain:.2f} times those without",
            as_deployed["tokens_per_s"],
            "tokens/s",
        )
    run.figures["levels"] = measured
    yield from slo_checks(run.recipe.slo, as_deployed["ttft_p95_ms"], as_deployed["itl_p95_ms"], most)


def _load(run: AcceptanceRun, streams: int, rounds: int, sampling: Sampling) -> LevelResult:
    """Put a load on the deployment, as the plan computes it.

    The first answer of each stream is of another length, so that they do not all end and begin together, and is not
    counted.
    """
    longest, exact = run.output_tokens, run.takes_exact_lengths
    texts = run.prompts(streams * (rounds + 1), run.prompt_tokens, f"{streams} {sampling}")

    def conversations() -> Iterator[ScriptedConversation]:
        for number, text in enumerate(texts):
            first = number < streams
            tokens = max(1, longest * (number + 1) // streams) if first else longest
            yield ScriptedConversation((Turn(text, tokens, exact and not first),), chat=False)

    period = Period(_LEVEL_S, streams * rounds, warm_up_requests=streams, grace_s=TIMEOUT_S)
    return run.load(streams, conversations(), period, {"temperature": 0.0, **sampling})


def _figures(level: LevelResult) -> dict[str, Any]:
    """Figures of a load for the report; a latency that was not measured is 0."""
    ttft, tpot, itl = (level.latencies.get(name) for name in ("ttft", "tpot", "itl"))
    return {
        "streams": level.load.concurrency,
        "requests": level.requests["complete"],
        "failed": sum(level.requests.values()) - level.requests["complete"],
        "ttft_p50_ms": ttft.p50 if ttft else None,
        "ttft_p95_ms": ttft.p95 if ttft else 0.0,
        "tpot_ms": round(tpot.mean, 3) if tpot else 0.0,
        "itl_p95_ms": itl.p95 if itl else 0.0,
        "tokens_per_s": round(_tokens_per_s(level), 1),
        "acceptance": level.acceptance,
    }


def _tokens_per_s(level: LevelResult) -> float:
    """Output tokens a second of all streams, by Little's law, because the last ones end alone."""
    pairs = zip(level.samples["output_tokens"], level.samples["total"], strict=True)
    ended = [(tokens, total_ms) for tokens, total_ms in pairs if tokens and total_ms]
    busy_s = sum(total_ms for _, total_ms in ended) / 1e3
    return level.load.concurrency * sum(tokens for tokens, _ in ended) / busy_s if busy_s else 0.0


def _no_fault(level: LevelResult) -> Checks:
    done, asked = level.requests["complete"], sum(level.requests.values())
    yield expect(
        f"{level.load.concurrency} streams, requests that failed",
        0 < done == asked,
        "0",
        f"{asked - done} of {asked}",
        "; ".join(list(level.errors)[:3]),
    )


def _is_checked(run: AcceptanceRun, streams: int) -> bool:
    """Whether published figures cover this load: none is of a draft, and some engines cannot answer without theirs."""
    if run.recipe.draft is not None and not run.separate_draft:
        return False
    memory, kind = (run.plan.memory if run.plan is not None else None), run.recipe.runtime.kind
    if memory is None or kind == "cpu":
        return False
    return not unchecked("throughput", memory.spec.models[0], memory.spec.device, kind, batch=streams)
