"""Is B slower than A, or was it noise? Ratios of two deployments' figures, with intervals, tests and verdicts. Pure.

Two deployments are measured in rounds, one after the other, with the same load (`run`); `statistics` says how ratios
over rounds are computed.

Two stored runs are one measurement each. Their loads are cut into windows of time, which are drawn anew (a block
bootstrap): requests that were under way together are no witnesses independent of each other. That tells two runs apart,
but not two packages, because other work of the machine is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, PrivateAttr

from pipeline.bench.compare.windows import Kept, RunWindows
from pipeline.bench.result import BenchResult, LevelResult, Section
from pipeline.bench.statistics import (
    ALPHA,
    MOST_ROUNDS,
    Interval,
    Ratio,
    holm,
    rounds_needed,
    scatter,
    trimmed_mean,
)
from pipeline.errors import Fault, InvalidInput

Side = Literal["a", "b"]
Verdict = Literal["better", "worse", "longer", "shorter", "no difference", "unknown"]

_LEAST_SHARE = 1e-3  # of the other's figure, that a rate of nothing counts as


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a load that is compared.

    Attributes:
        name: Key in JSON, such as ttft_p50.
        title: Name for people.
        unit: ms, or a rate.
        more_is_better: Whether a larger figure is better; None where any difference is one too many.
        of: Takes the figure from a load; None where the load has none.
        kept: Values of a stored run that it is made of.
        percent: Its percentile of a latency.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool | None
    of: Callable[[LevelResult], float | None]
    kept: Kept
    percent: int = 0


def _latency(name: Literal["ttft", "itl", "tpot", "total"], percent: int, title: str) -> Metric:
    def of(level: LevelResult) -> float | None:
        latency = level.latencies.get(name)
        return None if latency is None else latency.at(percent)

    return Metric(f"{name}_p{percent}", f"{title} p{percent}", "ms", False, of, name, percent)


LENGTH = "output_tokens_mean"
METRICS = (
    _latency("ttft", 50, "TTFT"),
    _latency("ttft", 95, "TTFT"),
    _latency("tpot", 50, "TPOT"),
    _latency("itl", 50, "ITL"),
    _latency("itl", 95, "ITL"),
    _latency("total", 50, "end to end"),
    Metric(
        "output_tokens_per_s", "output tokens", "tokens/s", True,
        lambda level: level.output_tokens_per_s, "output_tokens_per_s",
    ),
    Metric("goodput_per_s", "goodput", "requests/s", True, lambda level: level.goodput_per_s, "good_per_s"),
    Metric(
        LENGTH, "answer length", "tokens", None, lambda level: level.output_tokens_mean, "output_tokens"
    ),
)  # fmt: skip


class MetricComparison(Section):
    """One figure of A and of B under one load."""

    metric: str = Field(description="ttft_p50, output_tokens_per_s, …")
    title: str
    unit: str
    more_is_better: bool | None
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
    # Distribution of the ratio, for budgets; not written.
    _spread: Ratio | None = PrivateAttr(default=None)

    @property
    def regression(self) -> float:
        """How much worse B is, relative to A: 0.1 for 10 %; negative where it is better."""
        return 1 - self.ratio if self.more_is_better else self.ratio - 1

    @property
    def worst(self) -> float | None:
        """Upper end of the 95 % interval of `regression`; None where too little was measured."""
        if self.interval is None:
            return None
        low, high = self.interval
        return (
            max(1 - low, high - 1)
            if self.more_is_better is None
            else 1 - low
            if self.more_is_better
            else high - 1
        )

    def p_over(self, limit: float) -> float | None:
        """Probability of such a figure if B is worse by no more than a limit; None where too little was measured."""
        if self._spread is None:
            return None
        over = self._spread.p_at_most(1 + limit)
        under = 1 - self._spread.p_at_most(max(1 - limit, _LEAST_SHARE))
        if self.more_is_better is None:
            return min(1.0, 2 * min(over, under))
        return under if self.more_is_better else over

    def sentence(self, threshold: float) -> str:
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
                return f"{verdict} by {abs(self.ratio - 1):.1%}"


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
    loads = []
    for number, level in enumerate(a[0]):
        pairs = [(first[number], second[number]) for first, second in zip(a, b, strict=True)]
        drawn, left_out = list[MetricComparison](), dict[str, str]()
        for metric in METRICS:
            values = [(metric.of(first), metric.of(second)) for first, second in pairs]
            kept = [
                both
                for first, second in values
                if (both := _above_nothing(metric, first, second)) is not None
            ]
            if len(kept) < len(pairs):
                if any(first is not None or second is not None for first, second in values):
                    left_out[metric.name] = f"{len(pairs) - len(kept)} of {len(pairs)} rounds have none"
                continue
            drawn.append(_of_rounds(metric, kept))
        loads.append(_load(level, pairs, drawn, left_out))
    tests = sum(len(load.metrics) for load in loads)
    return tuple(
        load.model_copy(
            update={"metrics": tuple(_with_rounds_needed(m, threshold, tests) for m in load.metrics)}
        )
        for load in _judged(loads)
    )


def compare_runs(a: BenchResult, b: BenchResult) -> tuple[LoadComparison, ...]:
    """Compare two stored runs, by the requests of the loads that both have.

    Raises:
        InvalidInput: Their workloads differ; lists everything that does.
    """
    faults = list(_differences(a, b))
    common = [
        (level, other)
        for level in a.levels
        for other in b.levels
        if (level.kind, level.value) == (other.kind, other.value)
    ]
    if not common:
        loads = [", ".join(str(level.load) for level in run.levels) or "none" for run in (a, b)]
        faults.append(Fault(f"no load is in both: A has {loads[0]}, and B has {loads[1]}"))
    if faults:
        raise InvalidInput("the two runs did not ask the same", faults)
    compared = []
    for level_a, level_b in common:
        drawn, left_out = list[MetricComparison](), dict[str, str]()
        windows = RunWindows(level_a), RunWindows(level_b)
        for metric in METRICS:
            first, second = metric.of(level_a), metric.of(level_b)
            if (both := _above_nothing(metric, first, second)) is not None:
                drawn.append(_of_runs(metric, both, windows))
            elif first is not None or second is not None:
                left_out[metric.name] = "one of the runs has none"
        compared.append(_load(level_a, [(level_a, level_b)], drawn, left_out))
    return tuple(_judged(compared))


def _above_nothing(metric: Metric, a: float | None, b: float | None) -> tuple[float, float] | None:
    """Both figures, a rate of nothing as a thousandth of the other; None where a side has none, or both nothing."""
    if a is None or b is None or not (a or b) or not (metric.more_is_better or (a and b)):
        return None
    return max(a, b * _LEAST_SHARE), max(b, a * _LEAST_SHARE)


def _differences(a: BenchResult, b: BenchResult) -> Iterator[Fault]:
    for key in sorted(a.workload.keys() | b.workload.keys()):
        first, second = a.workload.get(key), b.workload.get(key)
        if first != second:
            yield Fault(f"is {first} in A, and {second} in B", key=f"workload.{key}")
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
    a, b = (trimmed_mean(side) for side in zip(*values, strict=True))
    ratio = trimmed_mean([second / first for first, second in values])
    rounds = tuple((_round(first), _round(second)) for first, second in values)
    return _comparison(metric, (a, b, ratio), Ratio.of_rounds(values), rounds)


def _of_runs(
    metric: Metric, figures: tuple[float, float], windows: tuple[RunWindows, RunWindows]
) -> MetricComparison:
    log, spread = math.log(figures[1] / figures[0]), None
    errors = [error for window in windows if (error := window.error(metric.kept, metric.percent)) is not None]
    if len(errors) == len(windows):
        spread = Ratio(log, math.hypot(*errors), min(window.free for window in windows))
    return _comparison(metric, (*figures, math.exp(log)), spread)


def _comparison(
    metric: Metric,
    values: tuple[float, float, float],
    spread: Ratio | None,
    rounds: tuple[tuple[float, float], ...] = (),
) -> MetricComparison:
    a, b, ratio = values
    interval = None if spread is None else spread.interval
    made = MetricComparison(
        metric=metric.name,
        title=metric.title,
        unit=metric.unit,
        more_is_better=metric.more_is_better,
        a=_round(a),
        b=_round(b),
        ratio=round(ratio, 5),
        interval=None if interval is None else (round(interval[0], 5), round(interval[1], 5)),
        p=None if spread is None else spread.p,
        p_adjusted=None,
        verdict="unknown",
        rounds=rounds,
    )
    made._spread = spread
    return made


def _judged(loads: Sequence[LoadComparison]) -> Iterator[LoadComparison]:
    """Correct the figures of all loads together, and give each its verdict."""
    adjusted = holm([metric.p for load in loads for metric in load.metrics if metric.p is not None])
    following = iter(adjusted)
    for load in loads:
        metrics = [
            metric if metric.p is None else _with_verdict(metric, next(following)) for metric in load.metrics
        ]
        yield load.model_copy(update={"metrics": tuple(metrics)})


def _with_verdict(metric: MetricComparison, p_adjusted: float) -> MetricComparison:
    verdict: Verdict = "no difference"
    if p_adjusted < ALPHA:
        more = metric.ratio > 1
        if metric.more_is_better is None:
            verdict = "longer" if more else "shorter"
        else:
            verdict = "better" if more == metric.more_is_better else "worse"
    return metric.model_copy(update={"p_adjusted": p_adjusted, "verdict": verdict})


def _with_rounds_needed(metric: MetricComparison, threshold: float, tests: int) -> MetricComparison:
    if metric.p is None:
        return metric
    needed = rounds_needed(scatter(metric.rounds), threshold, tests)
    return metric.model_copy(update={"rounds_needed": needed})


def _round(value: float) -> float:
    return float(f"{value:.6g}")
