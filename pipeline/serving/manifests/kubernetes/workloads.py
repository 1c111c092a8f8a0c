"""The base: what runs the pods, finds them, and keeps enough of them.

apps/v1 and policy/v1 of Kubernetes, and leaderworkerset.x-k8s.io/v1 where a model needs several machines:
https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/. No workload says how many there are: the overlays do
(`plain`), or what scales them (`production`).
"""

from __future__ import annotations

import math

from pipeline.serving.manifests.kubernetes.cluster import (
    LWS,
    REDIS_PORT,
    Cluster,
    Component,
    Object,
    documents,
)
from pipeline.serving.manifests.kubernetes.pods import gateway_pod, redis_pod, server_pod, worker_pod

# Of packages that were served before, to which `kubectl rollout undo` goes back.
KEPT_REVISIONS = 5


def server_file(cluster: Cluster) -> str:
    """Write server.yaml: Triton, and the Service by which gateways find it.

    Args:
        cluster: The deployment in its cluster.
    """
    ports = [
        {"name": name, "port": port, "targetPort": name}
        for name, port in cluster.description.server.ports.items()
        if name != "metrics"
    ]
    found_by = cluster.selector("triton")
    if cluster.nodes > 1:
        found_by = {f"{LWS}/name": cluster.server, f"{LWS}/worker-index": "0"}
    service = cluster.object(
        "v1", "Service", cluster.servers, "triton",
        spec={"clusterIP": "None", "selector": found_by, "ports": ports},
    )  # fmt: skip
    workload = group(cluster) if cluster.nodes > 1 else _deployment(cluster)
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
            "revisionHistoryLimit": KEPT_REVISIONS,
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
ready by DNS, send a conversation where its beginning is still in the KV cache, and share limits, answers and stored
responses by Redis; files and batches by PostgreSQL, where the recipe's cache.backend names it, else they are refused.
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
    comment = f"""
What gateways share: the counters of limits, cached answers and stored responses. In memory only: when it is started
again, limits begin anew, answers are made anew, and conversations cannot be continued by `previous_response_id`.
`pipeline deploy --redis URL` takes a server of yours instead. Its password is a Secret:
  kubectl create secret generic {cluster.secret("redis")} -n {cluster.options.namespace} \\
    --from-literal=password="$(openssl rand -hex 32)"
"""
    return documents(comment, deployment, service)


def _deployment(cluster: Cluster) -> Object:
    """One machine a server. A roll-out needs room for one more, and takes none away before that is ready."""
    start_s = cluster.description.server.start_s
    return cluster.object(
        "apps/v1", "Deployment", cluster.server, "triton",
        spec={
            "revisionHistoryLimit": KEPT_REVISIONS,
            # Of the time to load, in which a roll-out does not count as stuck, and of time to pull an image.
            "progressDeadlineSeconds": math.ceil(2 * start_s) + 1800,
            "selector": {"matchLabels": cluster.selector("triton")},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": server_pod(cluster),
        },
    )  # fmt: skip


def group(cluster: Cluster) -> Object:
    """Make the LeaderWorkerSet of a server over several machines.

    One pod of them runs mpirun over all, and they live and die together.
    """
    version, kind = cluster.workload
    return cluster.object(
        version, kind, cluster.server, "triton",
        spec={
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
