"""Files with which Prometheus and Grafana watch a deployment, rendered from recipes.

alerts.yaml        recording rules and alerts, with the targets of each recipe's SLO
alerts_test.yaml   unit tests of the alerts: promtool test rules alerts_test.yaml
prometheus.yml     which pages are scraped, and the labels by which rules and dashboard find them
dashboard.json     a dashboard for Grafana to import
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.recipe import Recipe
from pipeline.serving.monitoring.alerts import GATEWAY_JOB, TRITON_JOB, Pace
from pipeline.serving.monitoring.dashboard import dashboard
from pipeline.serving.monitoring.rule_files import rules_file, tests_file

__all__ = ["Pace", "WatchedDeployment", "monitoring_files"]

ALERTS, TESTS, PROMETHEUS, DASHBOARD = "alerts.yaml", "alerts_test.yaml", "prometheus.yml", "dashboard.json"
# At most; and in a rehearsal not below a second, which is also the time that a page may take.
_SCRAPE_S = 15


@dataclass(frozen=True, slots=True)
class WatchedDeployment:
    """A recipe, and where its pages of metrics are.

    Attributes:
        recipe: of the deployment.
        gateways: host:port of each gateway in front of it.
        tritons: host:port of the metrics of each Triton server that runs it; or the file in which `pipeline serve` and
            `pipeline rollout` keep that of this machine.
    """

    recipe: Recipe
    gateways: tuple[str, ...]
    tritons: tuple[str, ...] | Path


def monitoring_files(
    watched: Sequence[WatchedDeployment], *, runbook_url: str, pace: Pace | None = None
) -> dict[str, str]:
    """Render the files.

    Args:
        watched: deployments that one Prometheus watches.
        runbook_url: of the page to which alerts link, which has a section for each.
        pace: lengths of windows and intervals; by default those for production.

    Returns:
        Name of each file -> its text. Tests are for the pace of production only.
    """
    chosen = pace or Pace()
    recipes = [one.recipe for one in watched]
    names = ", ".join(recipe.name for recipe in recipes)
    made = f"# Of {names}, by `pipeline monitoring`; change the recipe's slo, and render it again.\n"
    files = {
        ALERTS: made + _yaml(rules_file(recipes, chosen, runbook_url)),
        TESTS: made + _yaml(tests_file(recipes, runbook_url, ALERTS, None)),
        PROMETHEUS: made + _yaml(_scrape_config(watched, chosen)),
        DASHBOARD: json.dumps(dashboard(recipes), indent=2) + "\n",
    }
    return files if chosen == Pace() else {name: text for name, text in files.items() if name != TESTS}


def _scrape_config(watched: Sequence[WatchedDeployment], pace: Pace) -> dict[str, Any]:
    interval = Pace()(max(1, round(_SCRAPE_S / pace.speedup)))
    gateways = sorted({address for one in watched for address in one.gateways})
    here = [str(one.tritons) for one in watched if isinstance(one.tritons, Path)]
    tritons = [
        {"targets": list(one.tritons), "labels": {"deployment": one.recipe.name}}
        for one in watched
        if not isinstance(one.tritons, Path)
    ]
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [ALERTS],
        "scrape_configs": [
            {"job_name": GATEWAY_JOB, "static_configs": [{"targets": gateways}]},
            {
                "job_name": TRITON_JOB,
                **({"file_sd_configs": [{"files": here}]} if here else {}),
                **({"static_configs": tritons} if tritons else {}),
            },
        ],
    }


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=120, allow_unicode=True)
