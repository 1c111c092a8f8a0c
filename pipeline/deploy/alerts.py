"""alerts.yaml, with recording rules and alerts, and its unit tests alerts_test.yaml for `promtool test rules`.

The PromQL is in templates/monitoring. Rules and tests of an alert are made from the same entry of alerts.yaml.j2. As
Prometheus 2.42 reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.deploy.templates import render_promql
from pipeline.recipe import Recipe
from pipeline.triton.deployment import TARGET_MODEL

TTFT, ITL = "pipeline_time_to_first_token_seconds", "pipeline_inter_token_latency_seconds"
GATEWAY_JOB, TRITON_JOB = "pipeline-gateway", "triton"
_LATENCIES = {
    TTFT: {"alert": "TimeToFirstToken", "words": "time to first token", "least_s": 0.02},
    ITL: {"alert": "InterTokenLatency", "words": "inter-token latency", "least_s": 0.002},
}


@dataclass(frozen=True, slots=True)
class TimeScale:
    """Lengths of windows and waits.

    Attributes:
        speedup: Above 1, to rehearse alerts in less time: windows, waits and numbers of observations are divided by it.

    >>> TimeScale().duration(300), TimeScale(speedup=60).duration(300), TimeScale(speedup=100).duration(60)
    ('5m', '5s', '600ms')
    """

    speedup: float = 1.0

    def duration(self, seconds: float) -> str:
        """Write a duration of production, scaled, as Prometheus reads it."""
        ms = max(1, round(1000 * seconds / self.speedup))
        unit, size = next(
            (unit, size)
            for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
            if ms % size == 0
        )
        return f"{ms // size}{unit}"

    def count(self, observations: int) -> int:
        """Scale a number of observations within a window of production."""
        return max(1, round(observations / self.speedup))


class AlertExample(BaseModel):
    """Series under which an alert fires, and under which it does not; see alerts.yaml.j2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    firing: dict[str, str]
    quiet: dict[str, str]
    minute: int
    figure: str
    labels: dict[str, str] = {}


class Alert(BaseModel):
    """One alert, as an entry of alerts.yaml.j2 has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    severity: Literal["warning", "critical"]
    expr: str
    hold_s: int
    summary: str
    description: str
    figure: str
    example: AlertExample

    @property
    def figure_template(self) -> str:
        """The value as Prometheus fills it in."""
        return f'{{{{ printf "{self.figure}" $value }}}}'


def matchers(namespace: str | None, **labels: str) -> str:
    """Write labels of series as they stand between the braces of PromQL; a namespace of None is left out.

    >>> matchers("prod", model="llama"), matchers(None, model="llama")
    ('namespace="prod",model="llama"', 'model="llama"')
    """
    wanted = {**({} if namespace is None else {"namespace": namespace}), **labels}
    return ",".join(f'{name}="{value}"' for name, value in wanted.items())


def alerts_of(
    recipe: Recipe, scale: TimeScale | None = None, namespace: str | None = None
) -> Iterator[Alert]:
    """Make the alerts of a deployment.

    Args:
        scale: Lengths of windows; by default those for production.
        namespace: Namespace of Kubernetes whose series alone count; None where there is none.
    """
    scale = scale or TimeScale()
    of = matchers(namespace, model=recipe.name)

    def histogram(metric: str, bound_s: float, *phases: Sequence[int]) -> dict[str, str]:
        return _histogram(metric, of, bound_s, *phases)

    entries = render_promql(
        "alerts.yaml",
        of=of,
        blocks=matchers(namespace, deployment=recipe.name, model=TARGET_MODEL),
        targets=list(slo_targets(recipe)),
        latencies=_LATENCIES,
        engine=recipe.runtime.kind != "pytorch",
        cache=recipe.cache.enabled,
        duration=scale.duration,
        count=scale.count,
        counter=_counter,
        histogram=histogram,
    )
    for entry in entries:
        yield Alert.model_validate(entry | {"summary": f"{recipe.name}: {entry['summary']}"})


def target_down(scale: TimeScale, namespace: str | None = None) -> Alert:
    """Make the alert for a page of metrics that cannot be scraped; it holds for all deployments of a file."""
    return Alert.model_validate(
        render_promql(
            "target_down.yaml",
            place="" if namespace is None else f"{matchers(namespace)},",
            gateway_job=GATEWAY_JOB,
            triton_job=TRITON_JOB,
            duration=scale.duration,
        )
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


def recording_rules(
    recipes: Sequence[Recipe], scale: TimeScale, namespace: str | None = None
) -> list[dict[str, Any]]:
    """Make the rules that several alerts and panels read.

    Args:
        namespace: Namespace of Kubernetes that is read, and recorded; None where there is none.
    """
    place = "" if namespace is None else f"{matchers(namespace)},"
    rules: list[dict[str, Any]] = render_promql(
        "records.yaml",
        models=f'{place}model=~"{"|".join(recipe.name for recipe in recipes)}"',
        latencies=(TTFT, ITL),
        targets=[(recipe.name, *target) for recipe in recipes for target in slo_targets(recipe)],
        duration=scale.duration,
    )
    if namespace is not None:
        for rule in rules:
            rule["labels"] = {"namespace": namespace, **rule.get("labels", {})}
    return rules


def rules_file(recipes: Sequence[Recipe], scale: TimeScale, namespace: str | None = None) -> dict[str, Any]:
    """Make alerts.yaml.

    Args:
        namespace: Namespace of Kubernetes whose series alone count, so that two deployments of one recipe do not alert
            for each other; None where there is none.
    """

    def rule(alert: Alert, recipe: Recipe, model: str) -> dict[str, Any]:
        return {
            "alert": alert.name,
            "expr": alert.expr,
            **({"for": scale.duration(alert.hold_s)} if alert.hold_s else {}),
            "labels": _labels(alert, model, namespace),
            "annotations": _annotations(alert, recipe),
        }

    groups = {
        "pipeline-records": recording_rules(recipes, scale, namespace),
        **{
            f"pipeline-alerts-{recipe.name}": [
                rule(alert, recipe, recipe.name) for alert in alerts_of(recipe, scale, namespace)
            ]
            for recipe in recipes
        },
        "pipeline-scrapes": [rule(target_down(scale, namespace), recipes[0], "")],
    }
    return {"groups": [{"name": name, "rules": rules} for name, rules in groups.items()]}


def promtool_tests(recipes: Sequence[Recipe], rules: str, namespace: str | None) -> dict[str, Any]:
    """Make alerts_test.yaml: each alert fires under its example, and does not otherwise.

    The rules are those for production.

    Args:
        rules: Name of the file that is tested, relative to the tests.
    """
    alerts = [
        (recipe, recipe.name, alert) for recipe in recipes for alert in alerts_of(recipe, namespace=namespace)
    ]
    cases = [
        {
            "name": f"{name} {alert.name} {'fires' if fires else 'does not fire'}",
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values}
                for series, values in (alert.example.firing if fires else alert.example.quiet).items()
            ]
            # A model without series on any page counts as not ready.
            + [
                {
                    "series": f"pipeline_model_ready{{{matchers(namespace, model=other.name)}}}",
                    "values": "1x120",
                }
                for other in recipes
                if other.name != name
            ],
            "alert_rule_test": [
                {
                    "eval_time": f"{alert.example.minute}m",
                    "alertname": alert.name,
                    "exp_alerts": [_fired(alert, recipe, name, namespace)] if fires else [],
                }
            ],
        }
        for recipe, name, alert in [*alerts, (recipes[0], "", target_down(TimeScale(), namespace))]
        for fires in (True, False)
    ]
    return {"rule_files": [rules], "evaluation_interval": "1m", "tests": cases}


def _fired(alert: Alert, recipe: Recipe, model: str, namespace: str | None) -> dict[str, Any]:
    """The alert as its example fires it, with all of Prometheus' templates filled in."""
    values = {alert.figure_template: alert.example.figure}
    values |= {f"{{{{ $labels.{label} }}}}": value for label, value in alert.example.labels.items()}
    annotations = _annotations(alert, recipe)
    for template, value in values.items():
        annotations = {key: text.replace(template, value) for key, text in annotations.items()}
    labels = {**_labels(alert, model, namespace), **alert.example.labels}
    return {"exp_labels": labels, "exp_annotations": annotations}


def _labels(alert: Alert, model: str, namespace: str | None) -> dict[str, str]:
    place = {} if namespace is None else {"namespace": namespace}
    return {"severity": alert.severity, **place, **({"model": model} if model else {})}


def _annotations(alert: Alert, recipe: Recipe) -> dict[str, str]:
    return {
        "summary": alert.summary,
        "description": alert.description.replace("{figure}", alert.figure_template),
        "runbook_url": f"{recipe.deploy.runbook_url}#{alert.name.lower()}",
    }


def _counter(*phases: Sequence[int]) -> str:
    """Values of a counter that grows evenly in each phase: minutes, how much a minute."""
    total, values = 0, ["0"]
    for minutes, rate in phases:
        values.append(f"{total + rate}+{rate}x{minutes - 1}")
        total += rate * minutes
    return " ".join(values)


def _histogram(metric: str, of: str, bound_s: float, *phases: Sequence[int]) -> dict[str, str]:
    """A histogram with 60 observations a minute; phases: minutes, and 0 for up to the bound or 1 for up to twice it."""
    series = {f"{metric}_count{{{of}}}": _counter(*((minutes, 60) for minutes, _ in phases))}
    for index, bound in enumerate((f"{bound_s:g}", f"{2 * bound_s:g}", "+Inf")):
        counted = ((minutes, 60 if bucket <= index else 0) for minutes, bucket in phases)
        series[f'{metric}_bucket{{{of},le="{bound}"}}'] = _counter(*counted)
    return series
