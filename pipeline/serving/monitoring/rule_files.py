"""alerts.yaml, with recording rules and alerts, and its unit tests alerts_test.yaml for `promtool test rules`.

Rules and tests of an alert are made from the same entry of the table in `alerts`. As Prometheus 2.42 reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.recipe import Recipe
from pipeline.serving.monitoring.alerts import (
    ITL,
    TTFT,
    Alert,
    Pace,
    alerts_of,
    matchers,
    slo_targets,
    target_down,
)


def recording_rules(
    recipes: Sequence[Recipe], pace: Pace, namespace: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield what several alerts and panels read. Names say 5m and 30m at any pace.

    Args:
        recipes: of the deployments.
        pace: lengths of windows.
        namespace: of Kubernetes: it is part of what is read, and of what is recorded; None where there is none.
    """
    for rule in _recorded(recipes, pace, "" if namespace is None else f"{matchers(namespace)},"):
        if namespace is not None:
            rule["labels"] = {"namespace": namespace, **rule.get("labels", {})}
        yield rule


def _recorded(recipes: Sequence[Recipe], pace: Pace, place: str) -> Iterator[dict[str, Any]]:
    of = f'{place}model=~"{"|".join(recipe.name for recipe in recipes)}"'
    for metric in (TTFT, ITL):
        buckets = f"{metric}_bucket{{{of}}}"
        rate, rate_before = f"model_le:{metric}:rate5m", f"model_le:{metric}:rate30m"
        yield {"record": rate, "expr": f"sum by (model, le) (rate({buckets}[{pace(300)}]))"}
        for quantile in (0.5, 0.95, 0.99):
            name = f"model:{metric}:p{100 * quantile:.0f}_5m"
            yield {"record": name, "expr": f"histogram_quantile({quantile}, {rate}{{{of}}})"}
        before = f"rate({buckets}[{pace(1800)}] offset {pace(300)})"
        yield {"record": rate_before, "expr": f"sum by (model, le) ({before})"}
        yield {"record": f"model:{metric}:p50_30m", "expr": f"histogram_quantile(0.5, {rate_before}{{{of}}})"}
        increase = f"sum by (model) (increase({metric}_count{{{of}}}[{pace(300)}]))"
        yield {"record": f"model:{metric}:increase5m", "expr": increase}
    kinds = [
        f"sum by (model) (rate(pipeline_{kind}_tokens_total{{{of}}}[{pace(300)}]))"
        for kind in ("prompt", "generation")
    ]
    yield {"record": "model:pipeline_tokens:rate5m", "expr": " + ".join(kinds)}
    yield {
        "record": "model:pipeline_requests_waiting:sum",
        "expr": f"sum by (model) (pipeline_requests_waiting{{{of}}})",
    }
    failed, all_ = (
        f"sum by (model) (rate(pipeline_requests_total{{{labels}}}[{pace(300)}]))"
        for labels in (f'{of},status=~"5.."', of)
    )
    yield {"record": "model:pipeline_requests_failed:ratio_rate5m", "expr": f"{failed} / ({all_} > 0)"}
    for recipe in recipes:
        for metric, quantile, target_s in slo_targets(recipe):
            labels = {"model": recipe.name, "metric": metric, "quantile": f"{quantile:g}"}
            yield {"record": "model:pipeline_slo_seconds", "expr": f"vector({target_s:g})", "labels": labels}


def rules_file(
    recipes: Sequence[Recipe], pace: Pace, runbook_url: str, namespace: str | None = None
) -> dict[str, Any]:
    """Make alerts.yaml.

    Args:
        recipes: of the deployments.
        pace: lengths of windows.
        runbook_url: of the page that has a section for each alert.
        namespace: of Kubernetes, whose series alone count, so that two deployments of one recipe do not alert for each
            other; None where there is none.
    """
    alerts = {
        f"pipeline-alerts-{recipe.name}": [
            _rule(alert, pace, runbook_url, recipe.name, namespace)
            for alert in alerts_of(recipe, pace, namespace)
        ]
        for recipe in recipes
    }
    groups = {
        "pipeline-records": list(recording_rules(recipes, pace, namespace)),
        **alerts,
        "pipeline-scrapes": [_rule(target_down(pace, namespace), pace, runbook_url, "", namespace)],
    }
    return {"groups": [{"name": name, "rules": rules} for name, rules in groups.items()]}


def tests_file(
    recipes: Sequence[Recipe], runbook_url: str, rules: str, namespace: str | None
) -> dict[str, Any]:
    """Make alerts_test.yaml, for `promtool test rules`: each alert fires under its example, and does not otherwise.

    The rules are those for production: with the default `Pace`.

    Args:
        recipes: of the deployments.
        runbook_url: of the page that has a section for each alert.
        rules: name of the file that is tested, relative to the tests.
        namespace: of the rules.
    """
    alerts = [(recipe.name, alert) for recipe in recipes for alert in alerts_of(recipe, namespace=namespace)]
    cases = [
        {
            "name": f"{name} {alert.name} {'fires' if fires else 'does not fire'}",
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values}
                for series, values in (alert.example.firing if fires else alert.example.quiet).items()
            ]
            # A model that no page tells of is not ready.
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
                    "exp_alerts": [_fired(alert, name, runbook_url, namespace)] if fires else [],
                }
            ],
        }
        for name, alert in [*alerts, ("", target_down(Pace(), namespace))]
        for fires in (True, False)
    ]
    return {"rule_files": [rules], "evaluation_interval": "1m", "tests": cases}


def _fired(alert: Alert, model: str, runbook_url: str, namespace: str | None) -> dict[str, Any]:
    """The alert as its example fires it, with all templates filled."""
    values = {_template(alert): alert.example.figure}
    values |= {f"{{{{ $labels.{label} }}}}": value for label, value in alert.example.labels.items()}
    annotations = _annotations(alert, runbook_url)
    for template, value in values.items():
        annotations = {key: text.replace(template, value) for key, text in annotations.items()}
    labels = {**_labels(alert, model, namespace), **alert.example.labels}
    return {"exp_labels": labels, "exp_annotations": annotations}


def _rule(alert: Alert, pace: Pace, runbook_url: str, model: str, namespace: str | None) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({"for": pace(alert.hold_s)} if alert.hold_s else {}),
        "labels": _labels(alert, model, namespace),
        "annotations": _annotations(alert, runbook_url),
    }


def _labels(alert: Alert, model: str, namespace: str | None) -> dict[str, str]:
    place = {} if namespace is None else {"namespace": namespace}
    return {"severity": alert.severity, **place, **({"model": model} if model else {})}


def _annotations(alert: Alert, runbook_url: str) -> dict[str, str]:
    return {
        "summary": alert.summary,
        "description": alert.description.format(figure=_template(alert)),
        "runbook_url": f"{runbook_url}#{alert.name.lower()}",
    }


def _template(alert: Alert) -> str:
    return f'{{{{ printf "{alert.figure}" $value }}}}'
