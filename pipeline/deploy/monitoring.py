"""Files with which Prometheus and Grafana watch deployments.

alerts.yaml        recording rules and alerts, with the targets of each recipe's SLO
alerts_test.yaml   unit tests of the alerts: promtool test rules alerts_test.yaml
prometheus.yml     which pages are scraped, and the labels by which rules and dashboard find them
dashboard.json     a dashboard for Grafana to import
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.deploy.alerts import GATEWAY_JOB, TRITON_JOB, TimeScale, promtool_tests, rules_file
from pipeline.deploy.dashboard import dashboard
from pipeline.deploy.templates import render
from pipeline.recipe import Recipe

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
