"""Results of `pipeline bench` without a server: requests of a given speed, put through what a real run goes through."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.bench.load import LoadRecords, RequestMeasurement
from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchForecast, BenchResult, LevelResult, ServerFigures
from pipeline.bench.summary import summarize
from pipeline.client import Stats
from pipeline.plan.performance.queueing import Workload
from pipeline.recipe import Slo

SLO = Slo(ttft_p95_ms=500, itl_p95_ms=50)
_WORK = Workload(512, 64)
# Requests at a time -> milliseconds to the first token, and between tokens.
Speed = Callable[[int], tuple[float, float]]


def usual(batch: int) -> tuple[float, float]:
    """A server that is within `SLO` with 16 requests at a time, and not with 32."""
    return 40 + 12.0 * batch, 12 + 1.4 * batch


def level(
    load: Load,
    speed: Speed = usual,
    *,
    work: Workload = _WORK,
    seconds: float = 30.0,
    spread: float = 0.0,
    slo: Slo | None = SLO,
    acceptance: float | None = None,
    seed: int | None = None,
) -> LevelResult:
    """A closed loop whose requests are as fast as `speed` says (above 0 ms), give or take `spread`."""
    records, chance = (
        LoadRecords(load, began_s=seconds / 10, ended_s=seconds),
        random.Random(load.concurrency if seed is None else seed),
    )
    first_ms, gap_ms = speed(load.concurrency)
    free = [0.0] * load.concurrency
    while free[0] < seconds:
        sent_s = heapq.heappop(free)
        gaps = tuple(gap_ms * chance.lognormvariate(0, spread) for _ in range(work.output_tokens - 1))
        ttft_ms = first_ms * chance.lognormvariate(0, spread)
        stats = Stats(
            ttft_ms=ttft_ms,
            total_ms=ttft_ms + sum(gaps),
            chunks=work.output_tokens,
            input_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            draft_tokens=None if acceptance is None else 100,
            accepted_tokens=None if acceptance is None else round(100 * acceptance),
        )
        ended_s = sent_s + (stats.total_ms or 0.0) / 1e3
        kept = records.counted if sent_s >= records.began_s else records.warm_up
        kept.append(
            RequestMeasurement(sent_s, sent_s, ended_s, "complete", stats, np.asarray(gaps, np.float32))
        )
        heapq.heappush(free, ended_s)
    return summarize(records, slo, ServerFigures(kv_used_mean=0.2, kv_used_max=0.4))


def failed_level(load: Load, error: str, slo: Slo | None = SLO) -> LevelResult:
    """No request was answered."""
    request = RequestMeasurement(0.0, 0.0, 1.0, "failed", Stats(), np.empty(0, np.float32), error=error)
    return summarize(LoadRecords(load, [request], ended_s=1.0), slo, ServerFigures())


def result(levels: Sequence[LevelResult], *, slo: Slo | None = SLO, **more: Any) -> BenchResult:
    """The result of a run with these loads."""
    fields: dict[str, Any] = {
        "name": "tiny-cpu",
        "made": "2026-11-23T10:00:00+00:00",
        "target": {"way": "triton", "url": "127.0.0.1:8001", "model": "tensorrt_llm_bls"},
        "machine": {"system": "Linux"},
        "workload": {"source": "words at random", "prompt_tokens": "512", "answer_tokens": "64"},
        "forecast": BenchForecast(none_because="this is a test"),
    }
    given = {} if slo is None else slo.model_dump(exclude_none=True)
    return BenchResult(**{**fields, **more}, seed=0, slo=given, levels=tuple(levels))
