"""Pods: what the containers of a description become in a cluster, with probes, limits, volumes and the way they end.

All of them obey Kubernetes' Pod Security Standard "restricted" and write nowhere but into folders that are empty at the
start. Probes of Triton only look at the file that the supervisor renews while generations come back, so they may be run
often (`pipeline.serving.health`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.contracts.gpus import gpu
from pipeline.serving.group import SSH_PORT
from pipeline.serving.manifests.description import PYTHON, Check, Container
from pipeline.serving.manifests.kubernetes.cluster import (
    GATEWAY_LEAVES_S,
    GATEWAY_WAITS_S,
    LWS,
    REDIS_PORT,
    SERVER_LEAVES_S,
    VERIFY_FILE,
    VERIFY_FOLDER,
    Cluster,
    Component,
    Object,
)
from pipeline.serving.manifests.kubernetes.volumes import (
    PACKAGES,
    fetch_mounts,
    mounts_of,
    redis_volumes,
    reserved_storage,
    verify_volume,
    volumes_of,
)
from pipeline.store.signature import VERIFY_VARIABLE

USER = 1000
_PROBE_S, _LIVENESS_S = 5, 20
_ZONE, _HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
# Besides the weights: Triton, its Python models and CUDA's contexts.
_HOST_GIB, _HOST_GIB_OF_A_GPU = 8, 4
# User and group `valkey` of the image: 8.1/alpine/Dockerfile of github.com/valkey-io/valkey-container.
REDIS_IMAGE, _REDIS_USER, _REDIS_GROUP = "docker.io/valkey/valkey:8.1-alpine", 999, 1000
_REDIS_MIB = 1024
# The password comes by standard input, which no list of processes shows.
_REDIS_COMMAND = f"""exec valkey-server - --save '' --appendonly no --dir /data \
  --maxmemory {_REDIS_MIB * 7 // 8}mb --maxmemory-policy allkeys-lru <<END
requirepass "$REDISCLI_AUTH"
END
"""
_GATEWAY_MEMORY, _GATEWAY_MEMORY_SEMANTIC = "2Gi", "4Gi"


def server_pod(cluster: Cluster) -> Object:
    """Make the template of a pod with Triton: of the only machine, or of the leader of several."""
    server = cluster.description.server
    group = cluster.nodes > 1
    container = _container(cluster, server) | {
        "resources": _server_resources(cluster),
        # The supervisor's own deadline comes first, and says why.
        "startupProbe": _probe(
            server.ready, _PROBE_S, math.ceil(((1 + group) * server.start_s + 60) / _PROBE_S)
        ),
        "readinessProbe": _probe(server.ready, _PROBE_S, 1),
        "livenessProbe": _probe(server.alive, _LIVENESS_S, 3),
        "lifecycle": _leave(SERVER_LEAVES_S),
    }
    if group:
        leaders = {f"{LWS}/name": cluster.server, f"{LWS}/worker-index": "0"}
        spread = _apart(leaders, _ZONE)
    else:
        spread = _apart(cluster.selector("triton"), _ZONE, _HOST)
    return template_of(
        cluster, "triton", _server_spec(cluster, container) | {"topologySpreadConstraints": spread}
    )


def worker_pod(cluster: Cluster) -> Object:
    """Make the template of a pod that holds ranks of a model whose leader is another pod.

    It is where its leader is; only leaders are spread.
    """
    server = cluster.description.server
    ssh = {"tcpSocket": {"port": "ssh"}}
    container = _container(cluster, server) | {
        "args": [PYTHON, "-m", "pipeline.serving.group"],
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "resources": _server_resources(cluster),
        "startupProbe": {**ssh, "periodSeconds": _PROBE_S, "failureThreshold": 24},
        # Its ranks are as ready as the leader is.
        "readinessProbe": _probe(
            Check(command=(PYTHON, "-m", "pipeline.serving.group", "ready")), _PROBE_S, 1
        ),
        "livenessProbe": {**ssh, "periodSeconds": _LIVENESS_S, "failureThreshold": 3},
        "lifecycle": _leave(SERVER_LEAVES_S),
    }
    return template_of(cluster, "triton", _server_spec(cluster, container))


def gateway_pod(cluster: Cluster) -> Object:
    """Make the template of a pod with a gateway."""
    gateway = cluster.description.gateway
    semantic = cluster.options.recipe.cache.enabled and cluster.options.recipe.cache.semantic is not None
    memory = _GATEWAY_MEMORY_SEMANTIC if semantic else _GATEWAY_MEMORY
    volumes = volumes_of(cluster, gateway)
    if cluster.options.verify_key is not None and cluster.options.packages is not None:
        volumes.append(verify_volume(cluster))
    limits = {"memory": memory, "ephemeral-storage": reserved_storage(volumes)}
    container = _container(cluster, gateway) | {
        "resources": {"requests": {"cpu": "1", **limits}, "limits": limits},
        "startupProbe": _probe(gateway.alive, _PROBE_S, math.ceil(gateway.start_s / _PROBE_S)),
        # A server that is started again is waited for: so long nobody is sent away.
        "readinessProbe": _probe(gateway.ready, _PROBE_S, GATEWAY_WAITS_S // _PROBE_S),
        "livenessProbe": _probe(gateway.alive, _LIVENESS_S, 3),
        "lifecycle": _leave(GATEWAY_LEAVES_S),
    }
    # Redis of the manifests asks for one; of another server it is for whoever runs that to say.
    own = cluster.options.redis is None
    passwords = [
        from_secret("PIPELINE_CACHE_PASSWORD", cluster.secret("redis"), "password", optional=not own)
    ]
    if cluster.options.recipe.cache.backend.kind == "pgvector":
        passwords.append(from_secret("PGPASSWORD", cluster.secret("postgres"), "password"))
    container["env"] = [*container.get("env", []), *passwords]
    spec: Object = {
        **_pod(cluster, "gateway", gateway, GATEWAY_LEAVES_S),
        "topologySpreadConstraints": _apart(cluster.selector("gateway"), _ZONE, _HOST),
        **_init(cluster, gateway, without_weights=True),
        "containers": [container],
        "volumes": volumes,
    }
    return template_of(cluster, "gateway", spec)


def redis_pod(cluster: Cluster) -> Object:
    """Make the template of a pod with Redis: answers and counters, in memory only, for whoever has the password."""
    volumes = redis_volumes()
    limits = {"memory": f"{_REDIS_MIB}Mi", "ephemeral-storage": reserved_storage(volumes)}
    ask = {"exec": {"command": ["valkey-cli", "ping"]}, "periodSeconds": _PROBE_S, "timeoutSeconds": 5}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(_REDIS_USER, _REDIS_GROUP),
        "containers": [
            {
                "name": "redis",
                "image": REDIS_IMAGE,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", _REDIS_COMMAND],
                # valkey-cli, of the probes, reads it by itself.
                "env": [from_secret("REDISCLI_AUTH", cluster.secret("redis"), "password", optional=False)],
                "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
                "resources": {"requests": {"cpu": "250m", **limits}, "limits": limits},
                "readinessProbe": ask,
                "livenessProbe": {**ask, "periodSeconds": _LIVENESS_S},
                "securityContext": container_security(),
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "volumes": volumes,
    }
    return template_of(cluster, "redis", spec)


def _server_spec(cluster: Cluster, container: Object) -> Object:
    """A pod around a container with ranks: on a GPU node, with the package, shared memory, and the key of a group."""
    server = cluster.description.server
    pod = _pod(cluster, "triton", server, SERVER_LEAVES_S)
    placed = on_gpus(cluster, pod["tolerations"])
    if cluster.nodes > 1:
        placed["affinity"] = {**placed.get("affinity", {}), "podAffinity": _one_zone(cluster)}
    return {
        **pod,
        **placed,
        **_init(cluster, server, without_weights=False),
        "containers": [container],
        "volumes": volumes_of(cluster, server),
    }


def template_of(cluster: Cluster, component: Component, spec: Object) -> Object:
    labels = cluster.labels(component)
    if component in ("triton", "gateway"):
        # What is rolled out, and rolled back, is this.
        labels = {**labels, "app.kubernetes.io/version": cluster.description.package_name}
    return {"metadata": {"labels": labels}, "spec": spec}


def _pod(cluster: Cluster, component: Component, container: Container, leaves_s: int) -> Object:
    # A Secret's files belong to root, and to this group.
    group = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"} if cluster.nodes > 1 else {}
    return {
        "serviceAccountName": cluster.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": leaves_s + container.stop_s,
        "securityContext": {**pod_security(), **(group if component == "triton" else {})},
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{state}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": cluster.options.scaling.lost_node_s,
            }
            for state in ("not-ready", "unreachable")
        ],
    }


def _apart(labels: dict[str, str], *keys: str) -> list[Object]:
    """Spread pods over zones and nodes where that is possible."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
        for key in keys
    ]


def _one_zone(cluster: Cluster) -> Object:
    """Keep the machines of one group together, wherever other groups are.

    LeaderWorkerSet labels pods with the key of their group. `matchLabelKeys` is of Kubernetes 1.31 and newer (beta; GA
    in 1.33); 1.30 leaves it out, and then all groups are in one zone.
    """
    term = {
        "topologyKey": _ZONE,
        "labelSelector": {"matchLabels": {f"{LWS}/name": cluster.server}},
        "matchLabelKeys": [f"{LWS}/group-key"],
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def on_gpus(cluster: Cluster, tolerations: Sequence[Object] = ()) -> Object:
    """Nodes with the GPU that the engines are for, by the labels of NVIDIA's GPU feature discovery."""
    required = cluster.description.deployment.requirements
    if required is None:
        return {}
    least_mib = math.floor(0.98 * gpu(required.gpu).driver_mib)
    wanted = [
        {"key": "nvidia.com/gpu.compute.major", "operator": "In", "values": [str(required.sm // 10)]},
        {"key": "nvidia.com/gpu.compute.minor", "operator": "In", "values": [str(required.sm % 10)]},
        {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [str(least_mib)]},
    ]
    terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "tolerations": [
            *tolerations,
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        ],
    }


def _container(cluster: Cluster, container: Container) -> Object:
    made: Object = {"name": container.name, "image": container.image, "imagePullPolicy": "IfNotPresent"}
    if container.arguments:
        made["args"] = list(container.arguments)
    if container.environment:
        made["env"] = [{"name": name, "value": value} for name, value in container.environment.items()]
    if cluster.options.verify_key is not None and container.name == "triton":
        made["env"] = [*made.get("env", []), _VERIFY]
    return made | {
        "ports": [{"name": name, "containerPort": port} for name, port in container.ports.items()],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(),
        "volumeMounts": mounts_of(cluster, container),
    }


def _server_resources(cluster: Cluster) -> Object:
    resources = cluster.description.server.resources
    host_cache_gib = cluster.options.recipe.kv_cache.host_memory_gib
    gib = cluster.sizes.weights / 2**30 / cluster.nodes + (resources.shm_mib or 0) / 1024
    gib += _HOST_GIB + _HOST_GIB_OF_A_GPU * resources.gpus + host_cache_gib
    # "64G" of Docker and systemd is 64Gi here.
    memory = f"{resources.memory}i" if resources.memory else f"{math.ceil(gib)}Gi"
    storage = reserved_storage(volumes_of(cluster, cluster.description.server))
    given = {"memory": memory, "ephemeral-storage": storage}
    given |= {"nvidia.com/gpu": str(resources.gpus)} if resources.gpus else {}
    # No limit of processor time: whoever is throttled stalls every stream.
    return {"requests": {"cpu": str(4 + 2 * resources.gpus), **given}, "limits": given}


def _probe(check: Check, period_s: int, failures: int) -> Object:
    how: Object = (
        {"exec": {"command": list(check.command)}}
        if check.command
        else {"httpGet": {"path": check.path, "port": "http"}}
    )
    return {**how, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _leave(seconds: int) -> Object:
    """Go on serving until nobody asks any more; then comes SIGTERM."""
    return {"preStop": {"exec": {"command": ["sleep", str(seconds)]}}}


def pod_security(user: int = USER, group: int = USER) -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _init(cluster: Cluster, container: Container, *, without_weights: bool) -> Object:
    """Fetch the package from the object store: each file is verified while it comes."""
    packages = cluster.options.packages
    if packages is None:
        return {}
    content = cluster.options.content
    named = cluster.description.package_name + ("" if content is None else f"@sha256:{content}")
    words = ["store", "pull", named, packages, "--output", PACKAGES]
    words += ["--without-weights"] if without_weights else []
    # The entrypoint of the server's image runs a command that it is given; the gateway's is the program itself.
    program = ["pipeline"] if container.name == "triton" else []
    fetch = {
        "name": "fetch",
        "image": container.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [*program, *words],
        "envFrom": [object_store_credentials(cluster)],
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        "volumeMounts": fetch_mounts(cluster),
    }
    if cluster.options.verify_key is not None:
        fetch["env"] = [_VERIFY]
    return {"initContainers": [fetch]}


_VERIFY = {"name": VERIFY_VARIABLE, "value": f"{VERIFY_FOLDER}/{VERIFY_FILE}"}


def object_store_credentials(cluster: Cluster) -> Object:
    return {"secretRef": {"name": cluster.secret("objects"), "optional": True}}


def from_secret(variable: str, secret: str, key: str, *, optional: bool = True) -> dict[str, Any]:
    reference = {"name": secret, "key": key, **({"optional": True} if optional else {})}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}
