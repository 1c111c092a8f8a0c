"""A Grafana dashboard, as JSON that Grafana imports, from the table of panels in dashboard.yaml.j2."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.deploy.alerts import ITL, TTFT
from pipeline.deploy.templates import render_promql
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
