"""What scaling and alerts of a cluster read."""

from __future__ import annotations

import json
import re

from pipeline.deploy.monitoring import WatchedDeployment, monitoring_files
from pipeline.gateway.metric_names import OWN_VIEWS
from pipeline.recipe import load_recipe
from pipeline.resources import parse_yaml
from tests.deploy.test_monitoring import engine_metrics
from tests.support.kubernetes import (
    CASES,
    case,
    documents,
    every_case,
    objects,
)


@every_case
def test_every_figure_is_of_the_own_namespace(name: str) -> None:
    """Two deployments of one recipe in two namespaces neither scale nor wake people for each other."""
    queries = [
        rule["expr"]
        for _, manifest in objects(case(name)) if manifest["kind"] == "PrometheusRule"
        for group in manifest["spec"]["groups"] for rule in group["rules"]
    ]  # fmt: skip
    (scaled,) = (manifest for _, manifest in objects(case(name)) if manifest["kind"] == "ScaledObject")
    queries += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    namespace = scaled_namespace(case(name))
    read = 0
    for query in queries:
        series = re.findall(
            r"\b(?:model(?:_le)?:)?(?:pipeline|nv|up)[a-z0-9_]*(?::\w+)?(?=[{\[\s]|$)(\{[^}]*\})?", query
        )
        assert series or "vector(" in query
        for labels in series:
            read += 1
            assert f'namespace="{namespace}"' in labels, query
            assert "model=" in labels or "deployment=" in labels or "job=" in labels or "model=~" in labels, (
                query
            )
    assert read > 30


def scaled_namespace(files: dict[str, str]) -> str:
    namespace: str = parse_yaml(files["overlays/production/kustomization.yaml"])["namespace"]
    return namespace


def test_scaling_reads_metrics_that_there_are() -> None:
    known = {view.name for view in OWN_VIEWS} | {
        f"{view.name}_bucket" for view in OWN_VIEWS if view.kind == "histogram"
    }
    known |= set(engine_metrics())
    for name in CASES:
        (scaled,) = (manifest for _, manifest in objects(case(name)) if manifest["kind"] == "ScaledObject")
        for trigger in scaled["spec"]["triggers"]:
            query = re.sub(r'"[^"]*"', "", trigger["metadata"]["query"])
            read = set(re.findall(r"\b(?:pipeline|nv)_[a-z0-9_]+", query))
            assert read
            assert read <= known


def test_scaling_follows_the_target_of_the_recipe() -> None:
    (scaled,) = (manifest for _, manifest in objects(case("one-node")) if manifest["kind"] == "ScaledObject")
    triggers = {trigger["name"]: trigger for trigger in scaled["spec"]["triggers"]}
    assert set(triggers) == {"requests", "queue-time", "kv-cache"}
    # Half of the 500 ms of slo.ttft_p95_ms.
    assert float(triggers["queue-time"]["metadata"]["threshold"]) == 0.25
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 8)
    (without,) = (manifest for _, manifest in objects(case("cpu")) if manifest["kind"] == "ScaledObject")
    assert "queue-time" not in {trigger["name"] for trigger in without["spec"]["triggers"]}


def test_rules_and_dashboard_are_those_of_one_machine() -> None:
    recipe = load_recipe("llama-3.1-8b-fp8", ("name=llama", "cache.enabled=true"))
    made = monitoring_files([WatchedDeployment(recipe, ("g:1",), ("t:1",))])
    files = case("one-node")
    board, alone = (
        json.loads(text) for text in (files["components/monitoring/dashboard.json"], made["dashboard.json"])
    )
    assert board["panels"] == alone["panels"]
    assert board["uid"] != alone["uid"], "Grafana has one dashboard of an id"
    # Of the namespace, in which two deployments of a recipe differ; and else the same.
    rules = parse_yaml(files["components/monitoring/rules.yaml"])["spec"]
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["labels"].pop("namespace") == "llama"
            rule["expr"] = rule["expr"].replace('namespace="llama",', "")
            rule |= {"labels": rule.pop("labels")} if rule["labels"] else {}
            if not rule.get("labels"):
                del rule["labels"]
    assert rules == parse_yaml(made["alerts.yaml"])
    jobs = {
        relabeling["replacement"]
        for document in documents(files["components/monitoring/monitors.yaml"])
        for endpoint in (
            *document["spec"].get("endpoints", ()),
            *document["spec"].get("podMetricsEndpoints", ()),
        )
        for relabeling in endpoint["relabelings"]
        if relabeling.get("targetLabel") == "job"
    }
    scraped = parse_yaml(made["prometheus.yml"])["scrape_configs"]
    assert jobs == {config["job_name"] for config in scraped}
