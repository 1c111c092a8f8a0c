"""The figures of a run as they are written: JSON (`result.schema.json`), held against the recipe's SLO.

Terms: TTFT is the time to the first token; ITL the gap between two chunks of one answer (all gaps together); TPOT the
mean time of an answer's output tokens after the first; `total` the whole request. Milliseconds. vLLM's benchmark has
the same names; AIPerf calls TPOT "inter token latency", and ITL "inter chunk latency".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pipeline.bench.load_settings import Load, TokensBy
from pipeline.bench.statistics import (
    PERCENTILES,
    Interval,
    histogram,
    percentile_intervals,
    percentiles,
    pooled_intervals,
)
from pipeline.document_faults import read_json

_STALL_S, _STALL_TTFTS = 1.0, 3.0  # a silence longer than both, in seconds and in median TTFTs, is a stall
MAX_FAILED = 0.01  # share of requests; beyond it a load is too much, whatever those that were answered saw
_MAX_BYTES = 1 << 30


class Section(BaseModel):
    """Part of a result."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResultDocument(Section):
    """A result that is written to a file of its own."""

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(self.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote.

        Raises:
            UnreadableFile: It cannot be read, or is not JSON.
            InvalidInput: It is not such a result; lists everything that is wrong.
        """
        return read_json(cls, path, _MAX_BYTES)


class Distribution(Section):
    """One latency over all counted requests."""

    count: int = Field(description="Values: requests, or gaps for ITL.")
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    intervals: dict[str, Interval | None] = Field(
        description="Percentile -> its 95 % interval; null where there are too few values for one."
    )
    histogram: tuple[tuple[float, ...], tuple[int, ...]] = Field(description="Edges of bins, and counts.")

    @classmethod
    def of(cls, groups: Sequence[npt.ArrayLike]) -> Self | None:
        """Compute a distribution from the values of each request; None without values."""
        filled = [values for group in groups if len(values := np.asarray(group, np.float64))]
        if not filled:
            return None
        values = np.concatenate(filled)
        single = len(values) == len(filled)
        intervals = percentile_intervals(values) if single else pooled_intervals(filled)
        at, (edges, counts) = percentiles(values), histogram(values)
        return cls(
            count=len(values),
            mean=rounded(float(values.mean())),
            **{f"p{percent}": rounded(at[percent]) for percent in PERCENTILES},
            max=rounded(float(values.max())),
            intervals={
                f"p{percent}": None if ends is None else (rounded(ends[0]), rounded(ends[1]))
                for percent, ends in intervals.items()
            },
            histogram=(tuple(map(rounded, edges)), tuple(counts)),
        )

    def at(self, percent: int) -> float:
        """Value at a percentile, one of `PERCENTILES`."""
        value: float = getattr(self, f"p{percent}")
        return value


class TimeWindow(Section):
    """Figures of one window of a load: chunks, first tokens and ends of answers that came in it."""

    at_s: float = Field(description="The window's middle, in seconds since the load began.")
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    output_tokens_per_s: float
    good_per_s: float | None = Field(default=None, description="Goodput of the window; null without an SLO.")
    itl_counts: dict[int, int] = Field(
        default_factory=dict,
        description="Gaps between chunks, counted in bins: number of a bin -> gaps. Bin n ends at 0.01 ms x 2^(n/32).",
    )


class Generator(Section):
    """Share of this process in the figures."""

    late_p99_ms: float = Field(description="How much later than planned it looked at its clock.")
    cpu_share: float = Field(description="Share of one processor that its thread used.")
    late_sent_p99_ms: float = Field(description="How much later than due requests were sent (open loop).")
    limits: str = Field(description="Why the generator itself may be the limit; empty if it is not.")


class ServerFigures(Section):
    """Figures of the server's metrics pages during the load; null where it has none."""

    kv_used_mean: float | None = Field(default=None, description="Share of the KV cache's blocks, 0 to 1.")
    kv_used_max: float | None = None
    waiting_max: int | None = Field(default=None, description="Most requests that waited at a time.")
    running_mean: float | None = Field(default=None, description="Requests being generated, on average.")
    queue_mean_ms: float | None = Field(
        default=None, description="Mean time that requests waited to be scheduled."
    )
    acceptance: float | None = Field(
        default=None,
        description="Share of draft tokens that were accepted, in all requests that ended meanwhile.",
    )


class SloCheck(Section):
    """One target of the recipe's SLO."""

    target: str = Field(description="ttft_p95_ms, itl_p95_ms, ttft_p99_ms or itl_p99_ms.")
    wanted: float
    measured: float | None
    met: bool


class LevelResult(Section):
    """The figures of one load."""

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    seconds: float = Field(
        description="From the end of the warm-up to that of the period; where requests were counted, to the last end."
    )
    interrupted: bool = Field(default=False, description="Whether it was ended early, by Ctrl-C.")
    requests: dict[str, int] = Field(description="complete, left, refused, failed, abandoned.")
    errors: dict[str, int] = Field(
        description="Example of an error -> how many requests had it, ids and numbers in it aside."
    )
    short_answers: int = Field(
        default=0, description="Completed answers with fewer tokens than the request had asked for."
    )
    tokens_by: TokensBy = Field(
        default="server",
        description="Who counted output tokens: the server (`usage`), the tokenizer that was given, or nobody: then "
        "the chunks of such answers are counted in place of tokens.",
    )
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    requests_per_s: float = Field(description="Requests completed within `seconds`, per second.")
    output_tokens_per_s: float
    input_tokens_per_s: float | None
    goodput_per_s: float | None = Field(
        description="Completed requests a second whose TTFT and TPOT are within ttft_p95_ms and itl_p95_ms of the SLO."
    )
    good_share: float | None
    latencies: dict[str, Distribution] = Field(
        description="ttft, itl, tpot, total, queue, prefill; in milliseconds."
    )
    acceptance: float | None = Field(
        description="Share of the draft's tokens that were accepted: of these requests, or by the gateway's page."
    )
    cached_share: float | None = Field(description="Share of answers that came from a response cache.")
    in_flight_max: int
    longest_silence_s: float | None = Field(
        default=None, description="Longest time without a chunk while requests were under way."
    )
    generator: Generator
    server: ServerFigures = ServerFigures()
    slo: tuple[SloCheck, ...] = ()
    timeline: tuple[TimeWindow, ...] = ()
    warnings: tuple[str, ...] = Field(default=(), description="Why to mistrust the figures of this load.")
    samples: dict[str, tuple[float | None, ...]] = Field(
        default_factory=dict,
        description="One value for each completed request: due_s, ttft, tpot, total, output_tokens.",
    )

    @property
    def load(self) -> Load:
        """The load that was asked for."""
        return Load(self.kind, self.value)

    @property
    def failed_share(self) -> float:
        """Share of requests that were refused, failed or abandoned."""
        bad = sum(self.requests[name] for name in ("refused", "failed", "abandoned"))
        return bad / max(1, sum(self.requests.values()))

    @property
    def within_slo(self) -> bool:
        """Whether all targets are met."""
        return all(check.met for check in self.slo)

    def holds(self, max_failed: float = MAX_FAILED) -> bool:
        """Whether the load is within the SLO, and no more than a share of its requests failed."""
        return self.within_slo and self.failed_share <= max_failed

    @property
    def stalled(self) -> bool:
        """Whether the server was silent for longer than its usual first token explains."""
        ttft, silence_s = self.latencies.get("ttft"), self.longest_silence_s
        usual_s = 0.0 if ttft is None else ttft.p50 / 1e3
        return silence_s is not None and silence_s > max(_STALL_S, _STALL_TTFTS * usual_s)

    @property
    def unit(self) -> str:
        """Unit of output: tokens, or chunks if tokens were not counted."""
        return "chunks" if self.tokens_by == "chunks" else "tokens"

    def p95(self, name: str) -> float | None:
        """95th percentile of a latency in ms; None where it was not measured."""
        latency = self.latencies.get(name)
        return None if latency is None else latency.p95


class ForecastPoint(Section):
    """One load as `pipeline plan` computes it."""

    concurrency: int = Field(
        description="Requests at a time; in an open loop as many as there were on average."
    )
    ttft_p95_ms: float
    tpot_mean_ms: float
    itl_p95_ms: float
    output_tokens_per_s: float


class BenchForecast(Section):
    """The loads of a run as `pipeline plan` computes them; or why it cannot."""

    none_because: str = Field(default="", description="Why there is none; empty where there is one.")
    device: str = Field(default="", description="Device that it is computed for.")
    source: str = Field(default="", description="Where the constants come from.")
    points: tuple[ForecastPoint | None, ...] = Field(
        default=(), description="One for each load, in their order; null where it is beyond what is computed."
    )
    warnings: tuple[str, ...] = ()


class BenchResult(ResultDocument):
    """One run of `pipeline bench`: what was asked of which server, and the figures of every load."""

    schema_version: Literal["pipeline.bench/1"] = Field(default="pipeline.bench/1", alias="schema")
    name: str = Field(description="Name of the deployment, or the address that was asked.")
    made: str = Field(description="Time of the run: ISO 8601, UTC.")
    target: dict[str, Any] = Field(
        description="kind (triton or openai), url, model, package digest, runtime, versions."
    )
    machine: dict[str, Any]
    workload: dict[str, Any]
    seed: int
    slo: dict[str, float]
    forecast: BenchForecast | None = Field(
        default=None, description="Forecast of `pipeline plan` for this workload."
    )
    levels: tuple[LevelResult, ...]
    warnings: tuple[str, ...] = Field(default=(), description="Why to mistrust the figures of all loads.")
    broke_at: float | None = Field(
        default=None, description="In a sweep: the first load that missed the SLO."
    )


def json_schema() -> str:
    """The JSON schema of `BenchResult`."""
    return json.dumps(BenchResult.model_json_schema(by_alias=True), indent=2, ensure_ascii=False) + "\n"


def rounded(value: float) -> float:
    """Round to a thousandth, as figures are written."""
    return round(value, 3)
