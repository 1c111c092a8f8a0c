"""The alerts of a deployment: a table, `alerts_of`, of which each entry has its PromQL and series to test it with.

Targets are those of the recipe's SLO: an alert on a latency without a target is left out.

Metrics are named as the gateway names them (`pipeline_*`, label `model`: the recipe's name), and as TensorRT-LLM's
backend does on Triton's page (`nv_trt_llm_*`, label `model`: Triton's model), to which the scrape configuration adds
the label `deployment`, the recipe's name. `rule_files` makes Prometheus's files of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.recipe import Recipe
from pipeline.triton.deployment import TARGET_MODEL

TTFT, ITL = "pipeline_time_to_first_token_seconds", "pipeline_inter_token_latency_seconds"
GATEWAY_JOB, TRITON_JOB = "pipeline-gateway", "triton"
_LATENCIES = {TTFT: "TimeToFirstToken", ITL: "InterTokenLatency"}
_WORDS = {TTFT: "time to first token", ITL: "inter-token latency"}

# Observations within five minutes below which a quantile says little.
_LEAST_OBSERVATIONS = {0.5: 20, 0.95: 20, 0.99: 100}
# Times the p50 of the 30 minutes before, and at least so many seconds more: below, the buckets decide.
_DEGRADED, _DEGRADED_BY_S = 1.5, {TTFT: 0.02, ITL: 0.002}
_SPIKE, _SPIKE_TOKENS_PER_S = 3, 50  # times the mean of the hour before, and at least so many
_KV_PRESSURE = 0.9  # share of the blocks
_FAILING = 0.01  # share of the requests


@dataclass(frozen=True, slots=True)
class Pace:
    """How long windows and waits are.

    >>> Pace()(300), Pace(speedup=60)(300), Pace(speedup=100)(60)
    ('5m', '5s', '600ms')
    """

    # Above 1, to rehearse alerts in less time: windows, waits and numbers of observations are divided by it.
    speedup: float = 1.0

    def __call__(self, seconds: float) -> str:
        """Write a duration as Prometheus reads it.

        Args:
            seconds: in production.
        """
        ms = max(1, round(1000 * seconds / self.speedup))
        unit, size = next(
            (unit, size)
            for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
            if ms % size == 0
        )
        return f"{ms // size}{unit}"

    def count(self, observations: int) -> int:
        """Scale a number of observations within a window.

        Args:
            observations: in a window of production.
        """
        return max(1, round(observations / self.speedup))


@dataclass(frozen=True, slots=True)
class Example:
    """Series under which an alert fires, and under which it does not, in promtool's notation, one value a minute."""

    firing: Mapping[str, str]
    quiet: Mapping[str, str]
    minute: int
    # What the figure is then, as the description shows it.
    figure: str
    # Labels that the alert takes from the series.
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: which is also its heading in the runbook.
        severity: "critical" for what users notice now, else "warning".
        expr: PromQL.
        hold_s: how long it must hold before the alert fires, in seconds.
        summary: one line.
        description: what is so, with `{figure}` where the value stands.
        figure: format of the value, as in printf.
        example: for its unit tests.
    """

    name: str
    severity: Literal["warning", "critical"]
    expr: str
    hold_s: int
    summary: str
    description: str
    figure: str
    example: Example


def matchers(namespace: str | None, **labels: str) -> str:
    """Write what series must have, between the braces of PromQL.

    Args:
        namespace: of Kubernetes, in which pages of metrics are scraped; None where there is none.
        labels: name -> value.

    >>> matchers("prod", model="llama"), matchers(None, model="llama")
    ('namespace="prod",model="llama"', 'model="llama"')
    """
    wanted = {**({} if namespace is None else {"namespace": namespace}), **labels}
    return ",".join(f'{name}="{value}"' for name, value in wanted.items())


def alerts_of(recipe: Recipe, pace: Pace | None = None, namespace: str | None = None) -> Iterator[Alert]:
    """Make the alerts of a deployment.

    Args:
        recipe: whose SLO the targets are.
        pace: lengths of windows.
        namespace: of Kubernetes, whose series alone count; None where there is none.
    """
    pace = pace or Pace()
    yield from _latency_alerts(recipe, pace, namespace)
    name = recipe.name
    of = matchers(namespace, model=name)
    tokens = "model:pipeline_tokens:rate5m"
    yield Alert(
        name="PipelineTokenSpike",
        severity="warning",
        expr=f"{tokens}{{{of}}} > {_SPIKE} * avg_over_time({tokens}{{{of}}}[{pace(3600)}] offset {pace(300)}) "
        f"and {tokens}{{{of}}} > {_SPIKE_TOKENS_PER_S}",
        hold_s=60,
        summary=f"{name}: far more tokens than in the hour before",
        description=f"{{figure}} tokens/s of prompts and answers, more than {_SPIKE} times the mean of an hour.",
        figure="%.0f",
        example=Example(
            firing=_counter(f"pipeline_generation_tokens_total{{{of}}}", (60, 6000), (10, 60_000))
            | _counter(f"pipeline_prompt_tokens_total{{{of}}}", (70, 600)),
            quiet=_counter(f"pipeline_generation_tokens_total{{{of}}}", (60, 6000), (10, 12_000))
            | _counter(f"pipeline_prompt_tokens_total{{{of}}}", (70, 600)),
            minute=68,
            figure="1010",
        ),
    )
    yield Alert(
        name="PipelineStreamsStalled",
        severity="critical",
        expr=f"sum by (model) (pipeline_stalled_streams{{{of}}}) > 0",
        hold_s=60,
        summary=f"{name}: streams get no tokens",
        description="{figure} streams have begun and get no further token.",
        figure="%.0f",
        example=Example(
            firing={f"pipeline_stalled_streams{{{of}}}": "0 0 3+0x8"},
            quiet={f"pipeline_stalled_streams{{{of}}}": "0 0 3 0x8"},
            minute=5,
            figure="3",
        ),
    )
    if recipe.runtime.kind != "pytorch":
        yield _kv_pressure(name, pace, namespace)
    yield Alert(
        name="PipelineQueueGrowing",
        severity="warning",
        expr=f"deriv(model:pipeline_requests_waiting:sum{{{of}}}[{pace(300)}]) * 60 > 0 "
        f"and min_over_time(model:pipeline_requests_waiting:sum{{{of}}}[{pace(300)}]) > 0",
        hold_s=300,
        summary=f"{name}: more requests come than are answered",
        description="The queue was never empty in five minutes, and grows by {figure} requests a minute.",
        figure="%.0f",
        example=Example(
            firing={f"pipeline_requests_waiting{{{of}}}": "0x5 4+4x20"},
            quiet={f"pipeline_requests_waiting{{{of}}}": "0x5 4 8 3 0 6 8 3 0 6 8 3 0 6 8 3 0"},
            minute=20,
            figure="4",
        ),
    )
    failures = "model:pipeline_requests_failed:ratio_rate5m"
    yield Alert(
        name="PipelineRequestsFailing",
        severity="critical",
        expr=f"{failures}{{{of}}} * 100 > {_FAILING * 100:g}",
        hold_s=120,
        summary=f"{name}: requests fail on our side",
        description="{figure} % of the requests of five minutes ended with a status of 500 or more.",
        figure="%.1f",
        example=Example(
            firing=_counter(f'pipeline_requests_total{{{of},status="200"}}', (20, 90))
            | _counter(f'pipeline_requests_total{{{of},status="503"}}', (20, 10)),
            quiet=_counter(f'pipeline_requests_total{{{of},status="200"}}', (20, 90))
            | _counter(f'pipeline_requests_total{{{of},status="429"}}', (20, 10)),
            minute=15,
            figure="10.0",
        ),
    )
    yield Alert(
        name="PipelineRestarted",
        severity="warning",
        expr=f"max by (model, component) (increase(pipeline_restarts_total{{{of}}}[{pace(900)}])) > 0",
        hold_s=0,
        summary=f"{name}: a process was restarted",
        description="{{{{ $labels.component }}}} was restarted {figure} times in 15 minutes.",
        figure="%.0f",
        example=Example(
            firing={f'pipeline_restarts_total{{{of},component="triton"}}': "0x10 2x10"},
            quiet={f'pipeline_restarts_total{{{of},component="triton"}}': "2x30"},
            minute=20,
            figure="2",
            labels={"component": "triton"},
        ),
    )
    ready = f"pipeline_model_ready{{{of}}}"
    yield Alert(
        name="PipelineNotReady",
        severity="critical",
        expr=f"(min by (model) ({ready}) or absent({ready}) - 1) == 0",
        hold_s=60,
        summary=f"{name}: not ready",
        description="pipeline_model_ready is {figure}: no inference goes through, or no gateway serves this model.",
        figure="%.0f",
        example=Example(
            firing={ready: "1x5 0x10"},
            quiet={ready: "1x5 0 1x10"},
            minute=8,
            figure="0",
        ),
    )
    if recipe.cache.enabled:
        yield _false_hit(name, pace, namespace)


def _latency_alerts(recipe: Recipe, pace: Pace, namespace: str | None) -> Iterator[Alert]:
    """Quantiles over target, and medians worse than before."""
    name = recipe.name
    of = matchers(namespace, model=name)
    for metric, quantile, target_s in slo_targets(recipe):
        series, percent = f"model:{metric}:p{100 * quantile:.0f}_5m{{{of}}}", f"p{100 * quantile:.0f}"
        yield Alert(
            name=f"Pipeline{_LATENCIES[metric]}{percent.upper()}High",
            severity="warning",
            expr=f"{series} > {target_s:g} and {_enough(metric, of, quantile, pace)}",
            hold_s=300,
            summary=f"{name}: {_WORDS[metric]} over target ({percent})",
            description=f"{percent} of five minutes was {{figure}} s; the target is {target_s:g} s.",
            figure="%.3f",
            example=Example(
                firing=_histogram(metric, of, target_s, (20, 1)),
                quiet=_histogram(metric, of, target_s, (20, 0)),
                minute=18,
                figure=f"{target_s * (1 + quantile):.3f}",
            ),
        )
    for metric, words in _WORDS.items():
        now, before = f"model:{metric}:p50_5m{{{of}}}", f"model:{metric}:p50_30m{{{of}}}"
        yield Alert(
            name=f"Pipeline{_LATENCIES[metric]}Degraded",
            severity="warning",
            expr=f"{now} > {_DEGRADED} * {before} and {now} - {before} > {_DEGRADED_BY_S[metric]:g} "
            f"and {_enough(metric, of, 0.5, pace)}",
            hold_s=120,
            summary=f"{name}: {words} is worse by half than before",
            description=f"p50 of the {words} was {{figure}} s over five minutes, "
            f"more than {_DEGRADED} times that of the 30 minutes before.",
            figure="%.3f",
            example=Example(
                firing=_histogram(metric, of, 0.1, (40, 0), (20, 1)),
                quiet=_histogram(metric, of, 0.1, (60, 1)),
                minute=48,
                figure="0.150",
            ),
        )


def _enough(metric: str, of: str, quantile: float, pace: Pace) -> str:
    return f"model:{metric}:increase5m{{{of}}} >= {pace.count(_LEAST_OBSERVATIONS[quantile])}"


def _kv_pressure(name: str, pace: Pace, namespace: str | None) -> Alert:
    def blocks(kind: str, **more: str) -> str:
        of = matchers(namespace, deployment=name, model=TARGET_MODEL, kv_cache_block_type=kind, **more)
        return f"nv_trt_llm_kv_cache_block_metrics{{{of}}}"

    series = [blocks(kind, instance="gpu1:8002") for kind in ("used", "max")]
    mean = {
        kind: f"sum by (instance) (avg_over_time({blocks(kind)}[{pace(300)}]))" for kind in ("used", "max")
    }
    return Alert(
        name="PipelineKvCachePressure",
        severity="warning",
        expr=f"100 * {mean['used']} / {mean['max']} > {100 * _KV_PRESSURE:g}",
        hold_s=60,
        summary=f"{name}: the KV cache is almost full",
        description="{figure} % of the blocks were used for five minutes; requests that come may wait for some.",
        figure="%.0f",
        example=Example(
            firing=dict(zip(series, ("95x20", "100x20"), strict=True)),
            quiet=dict(zip(series, ("85x20", "100x20"), strict=True)),
            minute=10,
            figure="95",
            labels={"instance": "gpu1:8002"},
        ),
    )


def _false_hit(name: str, pace: Pace, namespace: str | None) -> Alert:
    reports = f"pipeline_cache_events_total{{{matchers(namespace, model=name, event='false_hit_reported')}}}"
    return Alert(
        name="PipelineCacheFalseHit",
        severity="warning",
        expr=f"sum by (model) (increase({reports}[{pace(3600)}])) > 0",
        hold_s=0,
        summary=f"{name}: the cache answered with another question's answer",
        description="{figure} answers from the cache were reported as wrong within an hour.",
        figure="%.0f",
        example=Example(
            firing={reports: "0x80 1x40"},
            quiet={reports: "2x120"},
            minute=90,
            figure="1",
        ),
    )


def target_down(pace: Pace, namespace: str | None = None) -> Alert:
    """Make the alert for a page of metrics that cannot be scraped; it holds for all deployments of a file.

    Args:
        pace: lengths of windows.
        namespace: of Kubernetes, whose pages alone count; None where there is none.
    """
    place = f"{matchers(namespace)}," if namespace is not None else ""
    jobs = f'{place}job=~"{GATEWAY_JOB}|{TRITON_JOB}"'
    series = f"up{{{matchers(namespace, job=TRITON_JOB, instance='gpu1:8002')}}}"
    return Alert(
        name="PipelineTargetDown",
        severity="critical",
        expr=f"avg_over_time(up{{{jobs}}}[{pace(60)}]) * 100 < 50",
        hold_s=60,
        summary="A gateway or a Triton server cannot be scraped",
        description="{{{{ $labels.instance }}}} ({{{{ $labels.job }}}}) answered {figure} % of a minute's scrapes.",
        figure="%.0f",
        example=Example(
            firing={series: "1x5 0x10"},
            quiet={series: "1x5 0 1x10"},
            minute=12,
            figure="0",
            labels={"job": TRITON_JOB, "instance": "gpu1:8002"},
        ),
    )


def slo_targets(recipe: Recipe) -> Iterator[tuple[str, float, float]]:
    """Yield metric, quantile and target, in seconds, of each latency that the recipe has a target for."""
    slo = recipe.slo
    for metric, p95_ms, p99_ms in (
        (TTFT, slo.ttft_p95_ms, slo.ttft_p99_ms),
        (ITL, slo.itl_p95_ms, slo.itl_p99_ms),
    ):
        if p95_ms is not None:
            yield metric, 0.95, p95_ms / 1e3
            p99_ms = p99_ms or 2 * p95_ms
        if p99_ms is not None:
            yield metric, 0.99, p99_ms / 1e3


def _counter(series: str, *phases: tuple[int, int]) -> dict[str, str]:
    """A counter that grows evenly in each phase: (minutes, how much a minute)."""
    total, written = 0, ["0"]
    for minutes, rate in phases:
        written.append(f"{total + rate}+{rate}x{minutes - 1}")
        total += rate * minutes
    return {series: " ".join(written)}


def _histogram(metric: str, of: str, bound_s: float, *phases: tuple[int, int]) -> dict[str, str]:
    """A histogram with 60 observations a minute: (minutes, 0 for up to the bound, 1 for up to twice the bound)."""
    series: dict[str, str] = _counter(f"{metric}_count{{{of}}}", *((minutes, 60) for minutes, _ in phases))
    for index, bound in enumerate((f"{bound_s:g}", f"{2 * bound_s:g}", "+Inf")):
        counted = ((minutes, 60 if bucket <= index else 0) for minutes, bucket in phases)
        series |= _counter(f'{metric}_bucket{{{of},le="{bound}"}}', *counted)
    return series
