"""A Grafana dashboard of deployments: figures of the gateway and of Triton, with the targets of the SLO.

Panels are rows of a table, `_panels`; most read what the recording rules of `alerts` make, so that a panel shows the
very figure that an alert judges. JSON as Grafana imports it: dashboard schema 39 (Grafana 10.4 and newer, which
migrates it), panels `stat` and `timeseries`, a variable for the data source and one for the recipe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.recipe import Recipe
from pipeline.serving.monitoring.alerts import ITL, TTFT
from pipeline.triton.deployment import TARGET_MODEL

_SCHEMA_VERSION = 39
_LONGEST_UID = 40
_COLUMNS, _HEIGHT = 24, {"stat": 4, "timeseries": 8}
# The namespace of Kubernetes in which pages are scraped; .* where there is none.
_PLACE = 'namespace=~"$namespace"'
_OF = f'{_PLACE},model="$model"'
_TRITON = f'{_PLACE},deployment="$model"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: queries (PromQL, legend), the unit as Grafana names it, and its share of a row's 24 columns."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    columns: int = 8
    kind: Literal["stat", "timeseries"] = "timeseries"
    about: str = ""


def dashboard(recipes: Sequence[Recipe], namespace: str | None = None) -> dict[str, Any]:
    """Make the dashboard.

    Args:
        recipes: of the deployments that it shows, one at a time.
        namespace: of Kubernetes, which it shows first; None where there is none.
    """
    names = [recipe.name for recipe in recipes]
    # Grafana keeps one dashboard of an id, also where two namespaces have a deployment of one recipe.
    uid = f"pipeline-{names[0]}" if namespace is None else f"pipeline-{namespace}-{names[0]}"
    if len(uid) > _LONGEST_UID:
        uid = f"{uid[: _LONGEST_UID - 9]}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}"
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _rows(recipes):
        panels.append(
            _placed({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, 24, 1, panels)
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.columns > _COLUMNS:
                x, y = 0, y + _HEIGHT[row[0].kind]
            panels.append(_placed(_panel(panel), x, y, panel.columns, _HEIGHT[panel.kind], panels))
            x += panel.columns
        y += _HEIGHT[row[-1].kind]
    return {
        "uid": uid,
        "title": f"pipeline: {', '.join(names)}",
        "tags": ["pipeline", "triton", "llm"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source_variable(), _namespace_variable(namespace), _model_variable(names)]},
        "annotations": {"list": [_alerts_annotation()]},
        "links": [],
        "panels": panels,
    }


def _rows(recipes: Sequence[Recipe]) -> Iterator[tuple[str, list[Panel]]]:
    kinds = {recipe.runtime.kind for recipe in recipes}
    yield "Now", [
        Panel("Ready", ((f"min(pipeline_model_ready{{{_OF}}})", "ready"),), "bool_yes_no", 3, "stat"),
        Panel("Requests/s", ((_rate("pipeline_requests_total"), "requests"),), "reqps", 3, "stat"),
        Panel("Tokens/s", ((_rate("pipeline_generation_tokens_total"), "tokens"),), "short", 3, "stat"),
        Panel("Running", ((_sum("pipeline_requests_running"), "running"),), "short", 3, "stat"),
        Panel("Waiting", ((_sum("pipeline_requests_waiting"), "waiting"),), "short", 3, "stat"),
        Panel("Stalled streams", ((_sum("pipeline_stalled_streams"), "stalled"),), "short", 3, "stat"),
        Panel(
            "Restarts, 24 h",
            ((f"sum(max by (component) (increase(pipeline_restarts_total{{{_OF}}}[24h])))", "restarts"),),
            "short", 3, "stat",
        ),
        Panel(
            "Alerts firing",
            ((f'count(ALERTS{{alertstate="firing",{_OF}}}) or vector(0)', "alerts"),),
            "short", 3, "stat",
        ),
    ]  # fmt: skip
    yield "Latency", [
        *(_latency(title, metric) for title, metric in (("Time to first token", TTFT), ("Inter-token latency", ITL))),
        Panel(
            "Duration of requests, and their wait for a slot",
            tuple(
                (_quantile(quantile, f"pipeline_request_{metric}_seconds"), f"{words} p{100 * quantile:.0f}")
                for metric, words in (("duration", "whole"), ("queue", "wait"))
                for quantile in (0.5, 0.95)
            ),
            "s",
        ),
    ]  # fmt: skip
    yield (
        "Traffic",
        [
            Panel(
                "Requests by status", ((_rate("pipeline_requests_total", "status"), "{{status}}"),), "reqps"
            ),
            Panel(
                "Tokens/s",
                (
                    (_rate("pipeline_prompt_tokens_total"), "prompts"),
                    (_rate("pipeline_generation_tokens_total"), "answers"),
                ),
            ),
            Panel(
                "Requests under way",
                (
                    (_sum("pipeline_requests_running"), "running"),
                    (_sum("pipeline_requests_waiting"), "waiting"),
                    (_sum("pipeline_stalled_streams"), "stalled"),
                ),
            ),
            Panel(
                "Requests sent, by server",
                ((_rate("pipeline_server_requests_total", "server"), "{{server}}"),),
                "reqps",
            ),
            Panel("Requests asked again", ((_rate("pipeline_retries_total"), "retries"),), "reqps"),
            Panel(
                "Tokens/s by tenant, all models",
                (
                    (
                        f"sum by (tenant, kind) (rate(pipeline_tenant_tokens_total{{{_PLACE}}}[$__rate_interval]))",
                        "{{tenant}} {{kind}}",
                    ),
                ),
            ),
            Panel("Restarts", ((f"max by (component) (pipeline_restarts_total{{{_OF}}})", "{{component}}"),)),
        ],
    )
    if any(recipe.cache.enabled for recipe in recipes):
        hits = f'pipeline_cache_events_total{{{_OF},event=~"hit_.*"}}'
        asked = f'pipeline_cache_events_total{{{_OF},event=~"hit_.*|miss"}}'
        yield "Response cache", [
            Panel(
                "Share of requests that the cache answered",
                ((f"sum(rate({hits}[$__rate_interval])) / sum(rate({asked}[$__rate_interval]))", "hits"),),
                "percentunit", 12,
            ),
            Panel("Events", ((_rate("pipeline_cache_events_total", "event"), "{{event}}"),), "ops", 12),
        ]  # fmt: skip
    engine = f'{_TRITON},model="{TARGET_MODEL}"'
    if kinds != {"pytorch"}:
        used, most = (
            f'sum by (instance) (nv_trt_llm_kv_cache_block_metrics{{{engine},kv_cache_block_type="{kind}"}})'
            for kind in ("used", "max")
        )
        yield (
            "Engine",
            [
                Panel("KV cache: blocks used", ((f"{used} / {most}", "{{instance}}"),), "percentunit"),
                Panel(
                    "Requests in the engine",
                    (
                        (
                            f"sum by (request_type) (nv_trt_llm_request_metrics{{{engine}}})",
                            "{{request_type}}",
                        ),
                    ),
                ),
                Panel(
                    "In-flight batcher",
                    (
                        (
                            "sum by (inflight_batcher_specific_metric) "
                            f"(nv_trt_llm_inflight_batcher_metrics{{{engine}}})",
                            "{{inflight_batcher_specific_metric}}",
                        ),
                    ),
                ),
            ],
        )
    per_request = (
        f"sum by (model) (rate(nv_inference_{{what}}_duration_us{{{{{_TRITON}}}}}[$__rate_interval])) / "
        f"sum by (model) (rate(nv_inference_request_success{{{{{_TRITON}}}}}[$__rate_interval]) > 0) / 1e6"
    )
    yield (
        "Triton",
        [
            Panel("Time of a request, by model", ((per_request.format(what="request"), "{{model}}"),), "s"),
            Panel(
                "Wait in Triton's queue, by model", ((per_request.format(what="queue"), "{{model}}"),), "s"
            ),
            Panel(
                "Pending requests",
                ((f"sum by (model) (nv_inference_pending_request_count{{{_TRITON}}})", "{{model}}"),),
            ),
            Panel(
                "Failures/s by reason",
                (
                    (
                        f"sum by (model, reason) (rate(nv_inference_request_failure{{{_TRITON}}}[$__rate_interval]))",
                        "{{model}} {{reason}}",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "Processors of the machine",
                ((f"nv_cpu_utilization{{{_TRITON}}}", "{{instance}}"),),
                "percentunit",
            ),
            Panel(
                "Memory of the machine",
                ((f"nv_cpu_memory_used_bytes{{{_TRITON}}}", "{{instance}}"),),
                "bytes",
            ),
        ],
    )
    if kinds != {"cpu"}:
        gpu = "{{instance}} {{gpu_uuid}}"
        yield (
            "GPU",
            [
                Panel("Utilization", ((f"nv_gpu_utilization{{{_TRITON}}}", gpu),), "percentunit"),
                Panel("Memory", ((f"nv_gpu_memory_used_bytes{{{_TRITON}}}", gpu),), "bytes"),
                Panel("Power", ((f"nv_gpu_power_usage{{{_TRITON}}}", gpu),), "watt"),
            ],
        )


def _latency(title: str, metric: str) -> Panel:
    """The recorded quantiles, and the targets."""
    quantiles = tuple((f"model:{metric}:p{number}_5m{{{_OF}}}", f"p{number}") for number in (50, 95, 99))
    target = f'model:pipeline_slo_seconds{{{_OF},metric="{metric}"}}'
    return Panel(
        title, (*quantiles, (target, "target, quantile {{quantile}}")), "s", about="Over five minutes."
    )


def _sum(metric: str) -> str:
    return f"sum({metric}{{{_OF}}})"


def _rate(metric: str, *by: str) -> str:
    grouped = f"sum by ({', '.join(by)}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{_OF}}}[$__rate_interval]))"


def _quantile(quantile: float, metric: str) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{metric}_bucket', 'le')})"


def _panel(panel: Panel) -> dict[str, Any]:
    drawn = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 10,
        "showPoints": "never",
        "spanNulls": False,
    }
    stat = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
    lines = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": drawn if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "options": stat if panel.kind == "stat" else lines,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _placed(
    panel: dict[str, Any], x: int, y: int, columns: int, height: int, before: Sequence[Any]
) -> dict[str, Any]:
    return {"id": len(before) + 1, **panel, "gridPos": {"x": x, "y": y, "w": columns, "h": height}}


def _source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def _namespace_variable(namespace: str | None) -> dict[str, Any]:
    everywhere = {"text": "All", "value": "$__all"}
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(pipeline_model_ready, namespace)",
        "refresh": 1,
        "current": everywhere if namespace is None else {"text": namespace, "value": namespace},
        "multi": False,
        "includeAll": True,
        # Matches series without this label, too.
        "allValue": ".*",
        "hide": 0,
    }


def _model_variable(names: Sequence[str]) -> dict[str, Any]:
    options = [{"text": name, "value": name, "selected": name == names[0]} for name in names]
    return {
        "name": "model",
        "label": "Recipe",
        "type": "custom",
        "query": ",".join(names),
        "options": options,
        "current": options[0],
        "multi": False,
        "includeAll": False,
        "hide": 0,
    }


def _alerts_annotation() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f'ALERTS{{alertname=~"Pipeline.*",alertstate="firing",{_OF}}}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}}",
    }
