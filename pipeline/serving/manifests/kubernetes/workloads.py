"""The base: what runs the pods, finds them, keeps enough of them, and lets them talk to nobody else.

apps/v1, policy/v1 and networking.k8s.io/v1 of Kubernetes, and leaderworkerset.x-k8s.io/v1 where a model needs several
machines: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from pipeline.serving.manifests.kubernetes.cluster import (
    REDIS_PORT,
    Cluster,
    Component,
    Object,
    cache_port,
    documents,
)
from pipeline.serving.manifests.kubernetes.pods import gateway_pod, redis_pod, server_pod, worker_pod

# Of packages that were served before, to which `kubectl rollout undo` goes back.
_KEPT_REVISIONS = 5
# Labels of its pods are this and /name, /worker-index (api/leaderworkerset/v1/leaderworkerset_types.go of LWS).
_LWS = "leaderworkerset.sigs.k8s.io"


def server_file(cluster: Cluster) -> str:
    """Write server.yaml: Triton, and the Service by which gateways find it.

    Args:
        cluster: The deployment in its cluster.
    """
    grpc = {"name": "grpc", "port": cluster.description.server.ports["grpc"], "targetPort": "grpc"}
    found_by = cluster.selector("triton")
    if cluster.nodes > 1:
        found_by = {f"{_LWS}/name": cluster.server, f"{_LWS}/worker-index": "0"}
    service = cluster.object(
        "v1", "Service", cluster.servers, "triton",
        spec={"clusterIP": "None", "selector": found_by, "ports": [grpc]},
    )  # fmt: skip
    workload = _group(cluster) if cluster.nodes > 1 else _deployment(cluster)
    machines = f" by {cluster.nodes} machines each" if cluster.nodes > 1 else ""
    comment = f"""
Triton with {cluster.description.name}{machines}. Which package it serves is said by `subPath` and by the label
app.kubernetes.io/version: another one is rolled out by a change of both, and rolled back by the change back.
"""
    return documents(comment, workload, service, _budget(cluster, "triton", cluster.server))


def gateway_file(cluster: Cluster) -> str:
    """Write gateway.yaml: the gateways, and the Service by which clients find them.

    Args:
        cluster: The deployment in its cluster.
    """
    gateway = cluster.description.gateway
    deployment = cluster.object(
        "apps/v1", "Deployment", cluster.gateway, "gateway",
        spec={
            "replicas": cluster.options.gateways,
            "revisionHistoryLimit": _KEPT_REVISIONS,
            "selector": {"matchLabels": cluster.selector("gateway")},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": gateway_pod(cluster),
        },
    )  # fmt: skip
    port = {"name": "http", "port": gateway.ports["http"], "targetPort": "http"}
    service = cluster.object(
        "v1", "Service", cluster.gateway, "gateway",
        spec={"type": "ClusterIP", "selector": cluster.selector("gateway"), "ports": [port]},
    )  # fmt: skip
    comment = f"""
OpenAI's API in front of {cluster.description.name}: gateways without state of their own. They find the servers that are
ready by DNS, send a conversation where its beginning is still in the KV cache, and share limits and answers by Redis.
"""
    return documents(comment, deployment, service, _budget(cluster, "gateway", cluster.gateway))


def redis_file(cluster: Cluster) -> str:
    """Write redis.yaml: what gateways share, in memory only.

    Args:
        cluster: The deployment in its cluster.
    """
    deployment = cluster.object(
        "apps/v1", "Deployment", cluster.redis, "redis",
        spec={
            "replicas": 1,
            "selector": {"matchLabels": cluster.selector("redis")},
            "strategy": {"type": "Recreate"},
            "template": redis_pod(cluster),
        },
    )  # fmt: skip
    port = {"name": "redis", "port": REDIS_PORT, "targetPort": "redis"}
    service = cluster.object(
        "v1", "Service", cluster.redis, "redis",
        spec={"type": "ClusterIP", "selector": cluster.selector("redis"), "ports": [port]},
    )  # fmt: skip
    comment = """
What gateways share: the counters of limits, and cached answers. In memory only: when it is started again, limits begin
anew and answers are made anew. `pipeline deploy --redis URL` takes a server of yours instead.
"""
    return documents(comment, deployment, service)


def network_file(cluster: Cluster) -> str:
    """Write network.yaml: who may talk to whom.

    Args:
        cluster: The deployment in its cluster.
    """
    ports = cluster.description.server.ports
    monitoring = [_namespace(_monitoring_namespace(cluster))]
    triton_in = [
        _rule("from", [_pods(cluster, "gateway")], ports["grpc"]),
        _rule("from", monitoring, ports["metrics"]),
    ]
    triton_out = (
        [] if cluster.options.packages is None else [_rule("to", [], _port_of(cluster.options.packages))]
    )
    if cluster.nodes > 1:
        # MPI and NCCL choose their ports themselves.
        triton_in.append({"from": [_pods(cluster, "triton")]})
        triton_out.append({"to": [_pods(cluster, "triton")]})
    gateway_out = [_rule("to", [_pods(cluster, "triton")], ports["grpc"])]
    if cluster.options.redis is None:
        gateway_out.append(_rule("to", [_pods(cluster, "redis")], REDIS_PORT))
    else:
        gateway_out.append(_rule("to", [], urlsplit(cluster.options.redis).port or REDIS_PORT))
    if (port := cache_port(cluster)) is not None:
        gateway_out.append(_rule("to", [], port))
    if cluster.options.packages is not None:
        gateway_out.append(_rule("to", [], _port_of(cluster.options.packages)))
    gateway_in = [_rule("from", [], cluster.description.gateway.ports["http"])]
    policies = [
        _nothing_but_dns(cluster),
        _policy(cluster, "triton", cluster.server, triton_in, triton_out),
        _policy(cluster, "gateway", cluster.gateway, gateway_in, gateway_out),
    ]
    if cluster.options.redis is None:
        policies.append(
            _policy(
                cluster, "redis", cluster.redis, [_rule("from", [_pods(cluster, "gateway")], REDIS_PORT)], []
            )
        )
    comment = """
Who may talk to whom: clients to gateways, gateways to servers and Redis, Prometheus to pages of metrics, and all to
DNS. Nothing else, in either direction. It takes a network that knows NetworkPolicy.
"""
    return documents(comment, *policies)


def _deployment(cluster: Cluster) -> Object:
    """One machine a server. A roll-out needs room for one more, and takes none away before that is ready."""
    start_s = cluster.description.server.start_s
    return cluster.object(
        "apps/v1", "Deployment", cluster.server, "triton",
        spec={
            "replicas": cluster.options.replicas[0],
            "revisionHistoryLimit": _KEPT_REVISIONS,
            # Of the time to load, in which a roll-out does not count as stuck, and of time to pull an image.
            "progressDeadlineSeconds": math.ceil(2 * start_s) + 1800,
            "selector": {"matchLabels": cluster.selector("triton")},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": server_pod(cluster),
        },
    )  # fmt: skip


def _group(cluster: Cluster) -> Object:
    """Several machines a server: one pod of them runs mpirun over all, and they live and die together."""
    version, kind = cluster.workload
    return cluster.object(
        version, kind, cluster.server, "triton",
        spec={
            "replicas": cluster.options.replicas[0],
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 1},
            },
            # LWS makes its headless Service itself, under its own name: leaders are NAME-0.NAME, workers NAME-0-1.NAME.
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": cluster.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": server_pod(cluster),
                "workerTemplate": worker_pod(cluster),
            },
        },
    )  # fmt: skip


def _budget(cluster: Cluster, component: Component, name: str) -> Object:
    """Let nodes be emptied one pod after the other, and take those that are ill without asking."""
    return cluster.object(
        "policy/v1", "PodDisruptionBudget", name, component,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": cluster.selector(component)},
        },
    )  # fmt: skip


def _nothing_but_dns(cluster: Cluster) -> Object:
    dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": cluster.name, "labels": {"app.kubernetes.io/instance": cluster.name}},
        "spec": {
            "podSelector": {
                "matchLabels": {"app.kubernetes.io/instance": cluster.name},
                # Who builds fetches models from the Hub.
                "matchExpressions": [
                    {"key": "app.kubernetes.io/name", "operator": "NotIn", "values": ["build"]}
                ],
            },
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{"ports": dns}],
        },
    }


def _policy(
    cluster: Cluster, component: Component, name: str, ingress: Sequence[Object], egress: Sequence[Object]
) -> Object:
    spec = {
        "podSelector": {"matchLabels": cluster.selector(component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ingress),
        **({"egress": list(egress)} if egress else {}),
    }
    return cluster.object("networking.k8s.io/v1", "NetworkPolicy", name, component, spec=spec)


def _rule(direction: str, peers: Sequence[Object], port: int) -> Object:
    """A rule of a NetworkPolicy; without peers it holds for all."""
    rule: Object = {"ports": [{"port": port, "protocol": "TCP"}]}
    return {direction: list(peers), **rule} if peers else rule


def _pods(cluster: Cluster, component: Component) -> Object:
    return {"podSelector": {"matchLabels": cluster.selector(component)}}


def _namespace(name: str) -> Object:
    labels: Mapping[str, str] = {"kubernetes.io/metadata.name": name}
    return {"namespaceSelector": {"matchLabels": dict(labels)}}


def _monitoring_namespace(cluster: Cluster) -> str:
    """Where Prometheus runs: the second part of the name of its Service."""
    host = urlsplit(cluster.options.prometheus).hostname or ""
    parts = host.split(".")
    return parts[1] if len(parts) > 1 and parts[1] else "monitoring"


def _port_of(address: str) -> int:
    """Port on which an object store is reached."""
    parts = urlsplit(address)
    return (
        parts.port
        if parts.scheme in ("http", "https") and parts.port
        else 80
        if parts.scheme == "http"
        else 443
    )
