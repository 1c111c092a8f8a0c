"""Is B slower than A, or was it noise? Ratios of two deployments' figures, with intervals, tests and verdicts. Pure.

Two deployments are measured in rounds, one after the other, with the same load (`compare`). A round gives one ratio B/A
of each figure; what a machine does to both falls out of it. From the logarithms of the ratios come

    the ratio       their mean without the fifth that is lowest and the fifth that is highest: a round in which the
                    machine was busy with something else does not decide
    the interval    a bootstrap over rounds, widened for few of them as Hesterberg does ("What Teachers Should Know
                    About the Bootstrap", 2015): a plain one promises too much
    the verdict     a t-test of the trimmed mean (Tukey and McLaughlin, 1963), corrected by Holm for all figures that
                    are looked at together: a package that is compared with itself is called worse in less than one
                    case of twenty, whatever figure it would be

Of two stored runs there is one measurement each, so only their requests can be compared: medians by Mann-Whitney, 95th
percentiles by a permutation test. That tells two runs apart, but not two packages: what the machine did meanwhile is in
it, and requests that were under way together count as if they knew nothing of each other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.bench.result import BenchResult, LevelResult
from pipeline.bench.statistics import CONFIDENCE, Interval, Values
from pipeline.errors import Fault, InvalidInput

__all__ = [
    "METRICS",
    "LoadComparison",
    "Metric",
    "MetricComparison",
    "Side",
    "compare_rounds",
    "compare_runs",
]

Side = Literal["a", "b"]
Verdict = Literal["better", "worse", "no difference", "unknown"]

_ALPHA = 1 - CONFIDENCE
_TRIM = 0.2  # of the rounds, at each end
_POWER = 0.8
_RESAMPLES, _PERMUTATIONS = 4000, 1999
_LEAST_ROUNDS = 3
_LEAST_REQUESTS = 20
_MOST_ROUNDS = 400


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a load that is compared.

    Attributes:
        name: As in JSON: ttft_p50.
        title: For people.
        unit: ms, or what is counted a second.
        more_is_better: Whether a larger one is.
        of: Takes it from a load; None where the load has none.
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
        found = level.latencies.get(name)
        return None if found is None else found.at(percent)

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


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MetricComparison(_Section):
    """One figure of A and of B under one load."""

    metric: str = Field(description="ttft_p50, output_tokens_per_s, …")
    title: str
    unit: str
    more_is_better: bool
    a: float = Field(
        description="Of A: the geometric mean over rounds without the outermost, or that of the run."
    )
    b: float
    ratio: float = Field(
        description="B/A: the geometric mean of the ratios of the rounds without the outermost."
    )
    interval: Interval | None = Field(description="Of the ratio, 95 %; null where too little was measured.")
    p: float | None = Field(description="How likely a ratio like this is between equals.")
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
        """Say in words what was found.

        Args:
            threshold: Relative difference that one would like to see.
        """
        match self.verdict:
            case "unknown":
                return "unknown: too few values, or none were kept"
            case "no difference" if self.rounds:
                needed, done = self.rounds_needed, len(self.rounds)
                if needed is not None and needed <= done:
                    return f"no difference; {threshold:.0%} would have been seen"
                more = f"{needed} rounds" if needed is not None else f"not even {_MOST_ROUNDS} rounds"
                return f"no difference that {done} rounds show; {more} would show {threshold:.0%}"
            case "no difference":
                return "no difference"
            case verdict:
                return f"{verdict} by {abs(self.regression):.1%}"


class LoadComparison(_Section):
    """All figures of A and B under one load."""

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    load: str = Field(description="In words.")
    requests: tuple[int, int] = Field(description="Of A and B, all rounds together.")
    failed: tuple[int, int] = Field(description="Of those: refused, failed, abandoned.")
    metrics: tuple[MetricComparison, ...]
    left_out: dict[str, str] = Field(
        default_factory=dict, description="Figures that were not compared, and why."
    )


def compare_rounds(
    a: Sequence[Sequence[LevelResult]], b: Sequence[Sequence[LevelResult]], threshold: float
) -> tuple[LoadComparison, ...]:
    """Compare what two deployments did under the same loads, round by round.

    Args:
        a: Of each round the figures of each load.
        b: The same of the other, in the same order.
        threshold: Relative difference that one would like to see, above 0.
    """
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
        InvalidInput: They did not ask the same, with everything that differs.
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
    logs = np.log(np.asarray(values, np.float64))
    ratios = logs[:, 1] - logs[:, 0]
    a, b, ratio = (math.exp(_trimmed(one)) for one in (logs[:, 0], logs[:, 1], ratios))
    enough = len(values) >= _LEAST_ROUNDS
    scatter = _scatter(ratios) if enough else 0.0
    # Without any scatter there is nothing that a test could compute.
    p = float(abs(math.log(ratio)) < 1e-9) if enough else None
    if scatter > 1e-9:
        from scipy.stats import t

        kept = len(ratios) - 2 * int(_TRIM * len(ratios))
        p = float(2 * t.sf(abs(math.log(ratio)) / scatter * math.sqrt(len(ratios)), kept - 1))
    return _comparison(
        metric,
        (a, b, ratio),
        _bootstrap(ratios) if scatter > 1e-9 else None,
        p,
        tuple((_round(one), _round(other)) for one, other in values),
    )


def _trimmed(values: Values, axis: int = 0) -> Any:
    from scipy.stats import trim_mean

    return trim_mean(values, _TRIM, axis=axis)


def _scatter(ratios: Values) -> float:
    """Standard error of the trimmed mean times the root of the rounds: what stands for a standard deviation."""
    from scipy.stats.mstats import trimmed_stde

    if len(ratios) < 1 / _TRIM:
        return float(np.std(ratios, ddof=1))
    return float(trimmed_stde(ratios, (_TRIM, _TRIM))) * math.sqrt(len(ratios))


def _bootstrap(ratios: Values) -> Interval:
    """The interval of the ratio, from the logarithms of each round's."""
    from scipy.stats import bootstrap, norm, t

    rounds = len(ratios)
    # Hesterberg's expanded percentile interval: as wide as Student's t asks for where values are few.
    tail = norm.cdf(math.sqrt(rounds / (rounds - 1)) * t.ppf(_ALPHA / 2, rounds - 1))
    found: Any = bootstrap(
        (ratios,),
        _trimmed,
        confidence_level=1 - 2 * tail,
        n_resamples=_RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    return float(np.exp(found.confidence_interval.low)), float(np.exp(found.confidence_interval.high))


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
    found: Any = bootstrap(
        (a, b), log_ratio, n_resamples=_PERMUTATIONS, method="percentile", batch=100, **how
    )
    low, high = np.exp(found.confidence_interval)
    tested: Any = (
        mannwhitneyu(a, b)
        if percent == 50
        else permutation_test((a, b), log_ratio, n_resamples=_PERMUTATIONS, batch=100, **how)
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
    if p_adjusted < _ALPHA:
        verdict = "worse" if one.regression > 0 else "better"
    return one.model_copy(update={"p_adjusted": p_adjusted, "verdict": verdict})


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values of several tests, so that one of them errs in at most 5 % of all cases.

    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979; scipy has no function for it.

    Args:
        p_values: Of each test.

    Returns:
        In the same order, each as large as before or larger, at most 1.
    """
    order = np.argsort(p_values, kind="stable")
    found = np.empty(len(p_values))
    steps = np.arange(len(p_values), 0, -1)
    found[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values)[order] * steps))
    values: list[float] = found.tolist()
    return values


def _with_rounds_needed(one: MetricComparison, threshold: float, tests: int) -> MetricComparison:
    if len(one.rounds) < _LEAST_ROUNDS:
        return one
    needed = rounds_needed(_scatter(np.log([b / a for a, b in one.rounds])), threshold, tests)
    return one.model_copy(update={"rounds_needed": needed})


def rounds_needed(scatter: float, threshold: float, tests: int) -> int | None:
    """Compute how many rounds show a difference four times out of five, by the power of the t-test.

    Args:
        scatter: Standard deviation of the logarithms of ratios, from round to round, without the outermost.
        threshold: Relative difference to be shown, such as 0.05.
        tests: Figures that are looked at together.

    Returns:
        The fewest; None for more than 400.
    """
    from scipy.stats import nct, t

    shift = math.log1p(threshold) / max(scatter, 1e-9)

    def shows(rounds: int) -> bool:
        free = rounds - 2 * int(_TRIM * rounds) - 1
        power = nct.sf(t.ppf(1 - _ALPHA / 2 / max(1, tests), free), free, math.sqrt(rounds) * shift)
        # Where it is as good as certain, scipy gives no number.
        return bool(np.isnan(power) or power >= _POWER)

    counts = range(_LEAST_ROUNDS, _MOST_ROUNDS + 1)
    found = bisect_left(counts, x=True, key=shows)
    return counts[found] if found < len(counts) else None


def _round(value: float) -> float:
    return float(f"{value:.6g}")
