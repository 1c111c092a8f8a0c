"""Is B slower than A, or was it noise? Ratios of two deployments' figures, with intervals, tests and verdicts. Pure.

Two deployments are measured in rounds, one after the other, with the same load (`run`); `statistics` says how ratios
over rounds are computed.

Two stored runs are one measurement each, so only their requests can be compared: medians by Mann-Whitney, 95th
percentiles by a permutation test. That tells two runs apart, but not two packages: other work of the machine is part of
it, and requests that were under way together count as if they were independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pipeline.bench.result import BenchResult, LevelResult, Section
from pipeline.bench.statistics import (
    ALPHA,
    MOST_ROUNDS,
    Interval,
    RoundRatio,
    Values,
    holm,
    rounds_needed,
    scatter,
)
from pipeline.errors import Fault, InvalidInput

Side = Literal["a", "b"]
Verdict = Literal["better", "worse", "no difference", "unknown"]

_RESAMPLES = 1999  # of requests, and of permutations of them
_LEAST_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a load that is compared.

    Attributes:
        name: Key in JSON, such as ttft_p50.
        title: Name for people.
        unit: ms, or a rate.
        more_is_better: Whether a larger figure is better.
        of: Takes the figure from a load; None where the load has none.
        sample: Name of its values in `LevelResult.samples`, and the percentile; None where single values are not kept.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool
    of: Callable[[LevelResult], float | None]
    sample: tuple[str, int] | None = None


def _latency(name: str, percent: int, title: str, *, kept: bool = True) -> Metric:
    def of(level: LevelResult) -> float | None:
        latency = level.latencies.get(name)
        return None if latency is None else latency.at(percent)

    return Metric(
        f"{name}_p{percent}", f"{title} p{percent}", "ms", False, of, (name, percent) if kept else None
    )


METRICS = (
    _latency("ttft", 50, "TTFT"),
    _latency("ttft", 95, "TTFT"),
    _latency("itl", 50, "ITL", kept=False),
    _latency("itl", 95, "ITL", kept=False),
    _latency("tpot", 50, "TPOT"),
    _latency("total", 50, "end to end"),
    Metric("output_tokens_per_s", "output tokens", "tokens/s", True, lambda level: level.output_tokens_per_s),
    Metric("goodput_per_s", "goodput", "requests/s", True, lambda level: level.goodput_per_s),
)


class MetricComparison(Section):
    """One figure of A and of B under one load."""

    metric: str = Field(description="ttft_p50, output_tokens_per_s, …")
    title: str
    unit: str
    more_is_better: bool
    a: float = Field(
        description="Figure of A: geometric mean over rounds without the outermost, or that of the run."
    )
    b: float
    ratio: float = Field(description="B/A: geometric mean of the ratios of the rounds without the outermost.")
    interval: Interval | None = Field(
        description="95 % interval of the ratio; null where too little was measured."
    )
    p: float | None = Field(description="Probability of such a ratio between equals.")
    p_adjusted: float | None = Field(
        description="The same, corrected for all figures that were looked at (Holm)."
    )
    verdict: Verdict
    rounds_needed: int | None = Field(
        default=None,
        description="Rounds that would show a difference of the threshold four times out of five; null where no number "
        "of rounds is known to.",
    )
    rounds: tuple[tuple[float, float], ...] = Field(
        default=(), description="The figure of A and B in each round."
    )

    @property
    def regression(self) -> float:
        """How much worse B is, relative to A: 0.1 for 10 %; negative where it is better."""
        return 1 - self.ratio if self.more_is_better else self.ratio - 1

    def told(self, threshold: float) -> str:
        """Say the verdict in words, with the rounds that would show a relative difference of the threshold."""
        match self.verdict:
            case "unknown":
                return "unknown: too few values, or none were kept"
            case "no difference" if self.rounds:
                needed, done = self.rounds_needed, len(self.rounds)
                if needed is not None and needed <= done:
                    return f"no difference; {threshold:.0%} would have been seen"
                more = f"{needed} rounds" if needed is not None else f"not even {MOST_ROUNDS} rounds"
                return f"no difference that {done} rounds show; {more} would show {threshold:.0%}"
            case "no difference":
                return "no difference"
            case verdict:
                return f"{verdict} by {abs(self.regression):.1%}"


class LoadComparison(Section):
    """All figures of A and B under one load."""

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    load: str = Field(description="The load in words.")
    requests: tuple[int, int] = Field(description="Requests of A and B, all rounds together.")
    failed: tuple[int, int] = Field(description="Requests that were refused, failed or abandoned.")
    metrics: tuple[MetricComparison, ...]
    left_out: dict[str, str] = Field(
        default_factory=dict, description="Figures that were not compared -> why."
    )


def compare_rounds(
    a: Sequence[Sequence[LevelResult]], b: Sequence[Sequence[LevelResult]], threshold: float
) -> tuple[LoadComparison, ...]:
    """Compare what two deployments did under the same loads, round by round."""
    found = []
    for number, level in enumerate(a[0]):
        pairs = [(one[number], other[number]) for one, other in zip(a, b, strict=True)]
        drawn, left_out = list[MetricComparison](), dict[str, str]()
        for metric in METRICS:
            values = [(metric.of(one), metric.of(other)) for one, other in pairs]
            kept = [(one, other) for one, other in values if one and other]
            if len(kept) < len(pairs):
                if any(one is not None or other is not None for one, other in values):
                    left_out[metric.name] = f"{len(pairs) - len(kept)} of {len(pairs)} rounds have none"
                continue
            drawn.append(_of_rounds(metric, kept))
        found.append(_load(level, pairs, drawn, left_out))
    tests = sum(len(one.metrics) for one in found)
    return tuple(
        one.model_copy(
            update={"metrics": tuple(_with_rounds_needed(m, threshold, tests) for m in one.metrics)}
        )
        for one in _judged(found)
    )


def compare_runs(a: BenchResult, b: BenchResult) -> tuple[LoadComparison, ...]:
    """Compare two stored runs, by the requests of the loads that both have.

    Raises:
        InvalidInput: Their workloads differ; lists everything that does.
    """
    faults = list(_differences(a, b))
    common = [
        (one, other)
        for one in a.levels
        for other in b.levels
        if (one.kind, one.value) == (other.kind, other.value)
    ]
    if not common:
        loads = [", ".join(str(level.load) for level in run.levels) or "none" for run in (a, b)]
        faults.append(Fault(f"no load is in both: A has {loads[0]}, and B has {loads[1]}"))
    if faults:
        raise InvalidInput("the two runs did not ask the same", faults)
    found = []
    for one, other in common:
        drawn, left_out = list[MetricComparison](), dict[str, str]()
        for metric in METRICS:
            first, second = metric.of(one), metric.of(other)
            if first and second:
                drawn.append(_of_runs(metric, (first, second), (one, other)))
            elif first is not None or second is not None:
                left_out[metric.name] = "one of the runs has none"
        found.append(_load(one, [(one, other)], drawn, left_out))
    return tuple(_judged(found))


def _differences(a: BenchResult, b: BenchResult) -> Iterator[Fault]:
    for key in sorted(a.workload.keys() | b.workload.keys()):
        one, other = a.workload.get(key), b.workload.get(key)
        if one != other:
            yield Fault(f"is {one} in A, and {other} in B", key=f"workload.{key}")
    if a.seed != b.seed:
        yield Fault(f"is {a.seed} in A, and {b.seed} in B", key="seed")
    if a.target.get("way") != b.target.get("way"):
        yield Fault(f"is {a.target.get('way')} in A, and {b.target.get('way')} in B", key="target.way")


def _load(
    level: LevelResult,
    pairs: Sequence[tuple[LevelResult, LevelResult]],
    metrics: Sequence[MetricComparison],
    left_out: dict[str, str],
) -> LoadComparison:
    def total(names: Sequence[str] | None) -> tuple[int, int]:
        a, b = (
            sum(
                count
                for level in side
                for name, count in level.requests.items()
                if not names or name in names
            )
            for side in zip(*pairs, strict=True)
        )
        return a, b

    return LoadComparison(
        kind=level.kind,
        value=level.value,
        load=str(level.load),
        requests=total(None),
        failed=total(("refused", "failed", "abandoned")),
        metrics=tuple(metrics),
        left_out=left_out,
    )


def _of_rounds(metric: Metric, values: Sequence[tuple[float, float]]) -> MetricComparison:
    found = RoundRatio.of(values)
    rounds = tuple((_round(one), _round(other)) for one, other in values)
    return _comparison(metric, (found.a, found.b, found.ratio), found.interval, found.p, rounds)


def _of_runs(
    metric: Metric, figures: tuple[float, float], levels: tuple[LevelResult, LevelResult]
) -> MetricComparison:
    from scipy.stats import bootstrap, mannwhitneyu, permutation_test

    values = (*figures, figures[1] / figures[0])
    if metric.sample is None:
        return _comparison(metric, values, None, None)
    name, percent = metric.sample
    a, b = (
        np.asarray([value for value in level.samples.get(name, ()) if value is not None], np.float64)
        for level in levels
    )
    if min(len(a), len(b)) < _LEAST_REQUESTS:
        return _comparison(metric, values, None, None)

    def log_ratio(first: Values, second: Values, axis: int) -> Values:
        drawn = (np.percentile(one, percent, axis=axis) for one in (first, second))
        one, other = (np.log(np.maximum(values, 1e-9)) for values in drawn)
        return np.asarray(other - one)

    how: dict[str, Any] = {"vectorized": True, "random_state": np.random.default_rng(0)}
    found: Any = bootstrap((a, b), log_ratio, n_resamples=_RESAMPLES, method="percentile", batch=100, **how)
    low, high = np.exp(found.confidence_interval)
    tested: Any = (
        mannwhitneyu(a, b)
        if percent == 50
        else permutation_test((a, b), log_ratio, n_resamples=_RESAMPLES, batch=100, **how)
    )
    return _comparison(metric, values, (float(low), float(high)), float(tested.pvalue))


def _comparison(
    metric: Metric,
    values: tuple[float, float, float],
    interval: Interval | None,
    p: float | None,
    rounds: tuple[tuple[float, float], ...] = (),
) -> MetricComparison:
    a, b, ratio = values
    return MetricComparison(
        metric=metric.name,
        title=metric.title,
        unit=metric.unit,
        more_is_better=metric.more_is_better,
        a=_round(a),
        b=_round(b),
        ratio=round(ratio, 5),
        interval=None if interval is None else (round(interval[0], 5), round(interval[1], 5)),
        p=p,
        p_adjusted=None,
        verdict="unknown",
        rounds=rounds,
    )


def _judged(loads: Sequence[LoadComparison]) -> Iterator[LoadComparison]:
    """Correct the figures of all loads together, and give each its verdict."""
    adjusted = holm([one.p for load in loads for one in load.metrics if one.p is not None])
    following = iter(adjusted)
    for load in loads:
        metrics = [one if one.p is None else _with_verdict(one, next(following)) for one in load.metrics]
        yield load.model_copy(update={"metrics": tuple(metrics)})


def _with_verdict(one: MetricComparison, p_adjusted: float) -> MetricComparison:
    verdict: Verdict = "no difference"
    if p_adjusted < ALPHA:
        verdict = "worse" if one.regression > 0 else "better"
    return one.model_copy(update={"p_adjusted": p_adjusted, "verdict": verdict})


def _with_rounds_needed(one: MetricComparison, threshold: float, tests: int) -> MetricComparison:
    if one.p is None:
        return one
    needed = rounds_needed(scatter(one.rounds), threshold, tests)
    return one.model_copy(update={"rounds_needed": needed})


def _round(value: float) -> float:
    return float(f"{value:.6g}")
