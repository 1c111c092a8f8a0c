"""What a cluster may add to the base: scaling, monitoring, a way in from outside, keys; each a component of kustomize.

    scaling      keda.sh/v1alpha1 ScaledObject (KEDA 2.14 and newer, https://keda.sh/docs/latest/reference/scaledobject-spec),
                 autoscaling/v2 HorizontalPodAutoscaler
    monitoring   monitoring.coreos.com/v1 ServiceMonitor, PodMonitor and PrometheusRule of the Prometheus operator
    expose       networking.k8s.io/v1 Ingress, or gateway.networking.k8s.io/v1 HTTPRoute of the Gateway API 1.2
    api-keys     a Secret of API keys

Rules and dashboard are those of `pipeline monitoring`: they are made by the same functions.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pipeline.serving.manifests.description import Exposure
from pipeline.serving.manifests.kubernetes.cluster import Cluster, Object, documents, kustomization, patch_of
from pipeline.serving.monitoring import Pace
from pipeline.serving.monitoring.alerts import GATEWAY_JOB, TRITON_JOB
from pipeline.serving.monitoring.dashboard import dashboard
from pipeline.serving.monitoring.rule_files import rules_file
from pipeline.triton.deployment import TARGET_MODEL

_KEYS = "/etc/pipeline-keys"
_SCRAPE = "15s"
# What is led in from outside: the APIs of OpenAI, Anthropic and Azure, which ask for keys. Metrics stay inside: they do
# not ask for any.
_PUBLIC = ("/v1", "/openai")
# Seconds between two parts of an answer; one that is not streamed comes after all of its time.
_INGRESS_READ_S = 3600


def scaling_files(cluster: Cluster) -> dict[str, str]:
    """Write the component that adds and takes away servers and gateways.

    Args:
        cluster: The deployment in its cluster.
    """
    server = """
Servers by the requests that run and wait, the wait for a slot against the target of the recipe, and the KV cache. A
figure that Prometheus cannot give changes nothing. It takes KEDA 2.14 or newer.
"""
    gateway = "Gateways by the processors that they use: one core carries thousands of streams."
    return {
        "kustomization.yaml": kustomization(
            "Adds and takes away servers and gateways: nothing else may say how many there are.",
            component=True, resources=["server.yaml", "gateway.yaml"],
        ),
        "server.yaml": documents(server, _scaled_servers(cluster)),
        "gateway.yaml": documents(gateway, _scaled_gateways(cluster)),
    }  # fmt: skip


def monitoring_component(cluster: Cluster) -> dict[str, str]:
    """Write the component by which the Prometheus operator and Grafana watch the deployment.

    Args:
        cluster: The deployment in its cluster.
    """
    recipe = cluster.options.recipe
    rules = cluster.object(
        "monitoring.coreos.com/v1", "PrometheusRule", cluster.name, "gateway",
        spec=rules_file([recipe], Pace(), cluster.options.runbook_url, namespace=cluster.options.namespace),
    )  # fmt: skip
    board = {
        "name": f"{cluster.name}-dashboard",
        "files": ["dashboard.json"],
        "options": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
    }
    return {
        "kustomization.yaml": kustomization(
            """
Pages of metrics, recording rules and alerts for the Prometheus operator, and a dashboard that Grafana's sidecar finds.
Where your Prometheus takes only objects with a certain label, add that label here (`labels`).
""",
            component=True,
            resources=["monitors.yaml", "rules.yaml"],
            configMapGenerator=[board],
        ),
        "monitors.yaml": documents("Which pages are scraped, with the labels that rules and dashboard ask for.",
                                   *_monitors(cluster)),
        "rules.yaml": documents("Recording rules, and alerts with the targets of the recipe's slo.", rules),
        "dashboard.json": json.dumps(dashboard([recipe], cluster.options.namespace), indent=2) + "\n",
    }  # fmt: skip


def exposing_files(cluster: Cluster, exposure: Exposure) -> dict[str, str]:
    """Write the component that leads clients from outside to the gateway.

    Args:
        cluster: The deployment in its cluster.
        exposure: By what.
    """
    name = "ingress.yaml" if exposure.kind == "ingress" else "http-route.yaml"
    made = _ingress(cluster, exposure.name) if exposure.kind == "ingress" else _route(cluster, exposure.name)
    comment = """
A way in from outside, to the API alone. Answers are streamed for minutes: nothing between may keep them back, or end
them before.
"""
    return {
        "kustomization.yaml": kustomization("A way in from outside.", component=True, resources=[name]),
        name: documents(comment, made),
    }


def keys_files(cluster: Cluster) -> dict[str, str]:
    """Write the component by which gateways ask for API keys.

    Args:
        cluster: The deployment in its cluster.
    """
    pod = "/spec/template/spec"
    secret = {"name": "keys", "secret": {"secretName": cluster.secret("keys")}}
    mount = {"name": "keys", "mountPath": _KEYS, "readOnly": True}
    operations: list[dict[str, Any]] = [
        {"op": "add", "path": f"{pod}/volumes/-", "value": secret},
        {"op": "add", "path": f"{pod}/containers/0/volumeMounts/-", "value": mount},
        {"op": "add", "path": f"{pod}/containers/0/args/-", "value": "--keys"},
        {"op": "add", "path": f"{pod}/containers/0/args/-", "value": f"{_KEYS}/keys.yaml"},
    ]
    comment = f"""
Tenants with API keys and limits. The Secret is yours to make, from a file as `pipeline gateway --help` shows it:
  kubectl create secret generic {cluster.secret("keys")} -n {cluster.options.namespace} --from-file=keys.yaml
"""
    patches = [patch_of("Deployment", cluster.gateway, operations)]
    return {"kustomization.yaml": kustomization(comment, component=True, patches=patches)}


def _scaled_servers(cluster: Cluster) -> Object:
    policy, (least, most) = cluster.options.scaling, cluster.options.replicas
    version, kind = cluster.workload
    behavior = {
        "scaleUp": {
            "stabilizationWindowSeconds": policy.up_window_s,
            "selectPolicy": "Max",
            "policies": [
                {"type": "Percent", "value": policy.up_percent, "periodSeconds": 60},
                {"type": "Pods", "value": policy.up_pods, "periodSeconds": 60},
            ],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": policy.down_window_s,
            "selectPolicy": "Max",
            "policies": [
                {"type": "Percent", "value": policy.down_percent, "periodSeconds": 60},
                {"type": "Pods", "value": policy.down_pods, "periodSeconds": 60},
            ],
        },
    }
    return cluster.object(
        "keda.sh/v1alpha1", "ScaledObject", cluster.server, "triton",
        spec={
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": cluster.server},
            "pollingInterval": policy.interval_s,
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": _triggers(cluster),
        },
    )  # fmt: skip


def _triggers(cluster: Cluster) -> list[Object]:
    """Queries to Prometheus, whose greatest demand counts. Without an answer, KEDA leaves the number as it is."""
    policy, recipe = cluster.options.scaling, cluster.options.recipe
    place = f'namespace="{cluster.options.namespace}"'
    of = f'{place},model="{recipe.name}"'
    target = cluster.description.deployment.limits.max_concurrency * policy.requests
    under_way = f"sum(pipeline_requests_running{{{of}}}) + sum(pipeline_requests_waiting{{{of}}})"
    if policy.spare:
        under_way += f" + {policy.spare * target:g}"
    found = [_trigger(cluster, "requests", under_way, target, "AverageValue")]
    if recipe.slo.ttft_p95_ms is not None:
        buckets = f"sum by (le) (rate(pipeline_request_queue_seconds_bucket{{{of}}}[1m]))"
        # A quantile of no requests is no number, and means that nobody waits.
        query = f"(histogram_quantile(0.95, {buckets}) >= 0) or vector(0)"
        target_s = recipe.slo.ttft_p95_ms / 1e3 * policy.queue_time
        found.append(_trigger(cluster, "queue-time", query, target_s, "Value"))
    if cluster.description.deployment.runtime != "pytorch":
        labels = f'{place},deployment="{recipe.name}",model="{TARGET_MODEL}"'
        blocks = f"nv_trt_llm_kv_cache_block_metrics{{{labels},kv_cache_block_type="
        used, most = (f'sum by (instance) ({blocks}"{kind}"}})' for kind in ("used", "max"))
        found.append(_trigger(cluster, "kv-cache", f"avg({used} / {most})", policy.kv_cache, "Value"))
    return found


def _trigger(cluster: Cluster, name: str, query: str, threshold: float, how: str) -> Object:
    """Keys of `metadata` as pkg/scalers/prometheus_scaler.go of KEDA reads them."""
    return {
        "type": "prometheus",
        "name": name,
        "metricType": how,
        "metadata": {
            "serverAddress": cluster.options.prometheus,
            "query": query,
            "threshold": f"{threshold:g}",
            "ignoreNullValues": "false",
        },
    }


def _scaled_gateways(cluster: Cluster) -> Object:
    least, policy = cluster.options.gateways, cluster.options.scaling
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": policy.gateway_cpu}}
    most = max(2 * least, math.ceil(cluster.options.replicas[1] / 4))
    return cluster.object(
        "autoscaling/v2", "HorizontalPodAutoscaler", cluster.gateway, "gateway",
        spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": cluster.gateway},
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    )  # fmt: skip


def _monitors(cluster: Cluster) -> tuple[Object, Object]:
    deployment = {"targetLabel": "deployment", "replacement": cluster.options.recipe.name}
    gateway = {
        "port": "http",
        "path": "/metrics",
        "interval": _SCRAPE,
        "relabelings": [
            {"targetLabel": "job", "replacement": GATEWAY_JOB},
            # The gateway has a label of this name, which the port's would rename.
            {"action": "labeldrop", "regex": "endpoint"},
        ],
    }
    triton = {
        "port": "metrics",
        "path": "/metrics",
        "interval": _SCRAPE,
        "relabelings": [{"targetLabel": "job", "replacement": TRITON_JOB}, deployment],
    }
    return (
        cluster.object(
            "monitoring.coreos.com/v1", "ServiceMonitor", cluster.gateway, "gateway",
            spec={"selector": {"matchLabels": cluster.selector("gateway")}, "endpoints": [gateway]},
        ),
        cluster.object(
            "monitoring.coreos.com/v1", "PodMonitor", cluster.server, "triton",
            spec={"selector": {"matchLabels": cluster.selector("triton")}, "podMetricsEndpoints": [triton]},
        ),
    )  # fmt: skip


def _ingress(cluster: Cluster, class_name: str) -> Object:
    (port,) = cluster.description.gateway.ports
    backend = {"service": {"name": cluster.gateway, "port": {"name": port}}}
    paths = [{"path": path, "pathType": "Prefix", "backend": backend} for path in _PUBLIC]
    rule = {"host": cluster.options.hostname, "http": {"paths": paths}}
    made = cluster.object(
        "networking.k8s.io/v1", "Ingress", cluster.gateway, "gateway",
        spec={
            "ingressClassName": class_name,
            "tls": [{"hosts": [cluster.options.hostname], "secretName": f"{cluster.gateway}-tls"}],
            "rules": [rule],
        },
    )  # fmt: skip
    # Of ingress-nginx (docs/user-guide/nginx-configuration/annotations.md), which is retired since March 2026 and still
    # runs in many clusters; others stream by themselves, and pass over what they do not know.
    made["metadata"]["annotations"] = {
        "nginx.ingress.kubernetes.io/proxy-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-read-timeout": str(_INGRESS_READ_S),
        "nginx.ingress.kubernetes.io/proxy-body-size": "0",
    }
    return made


def _route(cluster: Cluster, gateway: str) -> Object:
    namespace, _, name = gateway.rpartition("/")
    parent = {"name": name, **({"namespace": namespace} if namespace else {})}
    (port,) = cluster.description.gateway.ports.values()
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": path}} for path in _PUBLIC],
        "backendRefs": [{"name": cluster.gateway, "port": port}],
        # As long as it takes.
        "timeouts": {"request": "0s"},
    }
    return cluster.object(
        "gateway.networking.k8s.io/v1", "HTTPRoute", cluster.gateway, "gateway",
        spec={"parentRefs": [parent], "hostnames": [cluster.options.hostname], "rules": [rule]},
    )  # fmt: skip
