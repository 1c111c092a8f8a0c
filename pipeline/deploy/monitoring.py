"""Files with which Prometheus and Grafana watch deployments.

alerts.yaml        recording rules and alerts, with the targets of each recipe's SLO
alerts_test.yaml   unit tests of the alerts: promtool test rules alerts_test.yaml
prometheus.yml     which pages are scraped, and the labels by which rules and dashboard find them
dashboard.json     a dashboard for Grafana to import
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.deploy.alerts import GATEWAY_JOB, ITL, TRITON_JOB, TTFT, TimeScale, promtool_tests, rules_file
from pipeline.deploy.templates import render, render_promql
from pipeline.recipe import Recipe
from pipeline.triton.deployment import TARGET_MODEL

_LONGEST_UID = 40
_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(recipes: Sequence[Recipe], namespace: str | None = None) -> dict[str, Any]:
    """Make the dashboard.

    Args:
        namespace: Namespace of Kubernetes that it shows first; None where there is none.
    """
    names = [recipe.name for recipe in recipes]
    kinds = {recipe.runtime.kind for recipe in recipes}
    # Grafana keeps one dashboard of an id, also where two namespaces have a deployment of one recipe.
    uid = f"pipeline-{names[0]}" if namespace is None else f"pipeline-{namespace}-{names[0]}"
    if len(uid) > _LONGEST_UID:
        uid = f"{uid[: _LONGEST_UID - 9]}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}"
    everywhere = {"text": "All", "value": "$__all"}
    table = render_promql(
        "dashboard.yaml",
        uid=uid,
        title=f"pipeline: {', '.join(names)}",
        names=names,
        models=[{"text": name, "value": name, "selected": name == names[0]} for name in names],
        current_namespace=everywhere if namespace is None else {"text": namespace, "value": namespace},
        ttft=TTFT,
        itl=ITL,
        target_model=TARGET_MODEL,
        cache=any(recipe.cache.enabled for recipe in recipes),
        engine=kinds != {"pytorch"},
        gpu=kinds != {"cpu"},
    )
    panels: list[dict[str, Any]] = []

    def place(panel: Mapping[str, Any], x: int, y: int, columns: int, height: int) -> None:
        panels.append(
            {"id": len(panels) + 1, **panel, "gridPos": {"x": x, "y": y, "w": columns, "h": height}}
        )

    y = 0
    for title, row in table["rows"].items():
        place({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, _COLUMNS, 1)
        x, y, height = 0, y + 1, 0
        for panel in row:
            kind = panel.get("kind", "timeseries")
            columns, height = panel.get("columns", 8), table["kinds"][kind]["height"]
            if x + columns > _COLUMNS:
                x, y = 0, y + height
            place(_panel(panel, kind, table["kinds"][kind]), x, y, columns, height)
            x += columns
        y += height
    return {**table["dashboard"], "panels": panels}


def _panel(panel: Mapping[str, Any], kind: str, look: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("about", ""),
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.get("unit", "short"), "min": 0, "custom": look["custom"]},
            "overrides": [],
        },
        "options": look["options"],
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel["queries"].items())
        ],
    }


# At most; and in a rehearsal not below a second, which is also the time that a page may take.
_SCRAPE_S = 15


@dataclass(frozen=True, slots=True)
class WatchedDeployment:
    """A recipe, and where its pages of metrics are.

    Attributes:
        gateways: host:port of each gateway in front of it.
        tritons: host:port of the metrics of each Triton server that runs it; or the file in which `pipeline serve` and
            `pipeline rollout` keep that of this machine.
    """

    recipe: Recipe
    gateways: tuple[str, ...]
    tritons: tuple[str, ...] | Path


def monitoring_files(watched: Sequence[WatchedDeployment], scale: TimeScale | None = None) -> dict[str, str]:
    """Render the files.

    Args:
        scale: Lengths of windows and intervals; by default those for production.

    Returns:
        Name of each file -> its text. Tests are for production only.
    """
    chosen = scale or TimeScale()
    recipes = [deployment.recipe for deployment in watched]
    names = ", ".join(recipe.name for recipe in recipes)
    head = f"# For {names}, by `pipeline monitoring`; change the recipe's slo, and render it again.\n"
    documents = {"alerts.yaml": rules_file(recipes, chosen)}
    if chosen == TimeScale():
        documents["alerts_test.yaml"] = promtool_tests(recipes, "alerts.yaml", None)
    prometheus = render(
        "monitoring/prometheus.yml",
        interval=TimeScale().duration(max(1, round(_SCRAPE_S / chosen.speedup))),
        gateway_job=GATEWAY_JOB,
        triton_job=TRITON_JOB,
        gateways=sorted({address for deployment in watched for address in deployment.gateways}),
        files=[str(deployment.tritons) for deployment in watched if isinstance(deployment.tritons, Path)],
        tritons=[
            (deployment.recipe.name, list(deployment.tritons))
            for deployment in watched
            if not isinstance(deployment.tritons, Path)
        ],
    )
    return {
        **{
            name: head + yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
            for name, document in documents.items()
        },
        "prometheus.yml": head + prometheus,
        "dashboard.json": json.dumps(dashboard(recipes), indent=2) + "\n",
    }
