"""Pods: what the containers of a description become in a cluster, with probes, limits, volumes and the way they end.

All of them obey Kubernetes' Pod Security Standard "restricted" and write nowhere but into folders that are empty at the
start. Probes of Triton only look at the file that the supervisor renews while generations come back, so they may be run
often (`pipeline.serving.health`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from pipeline import __version__
from pipeline.contracts.gpus import gpu
from pipeline.serving.group import DEFAULT_KEYS, SSH_PORT
from pipeline.serving.manifests.description import PYTHON, RECIPE_FILE, STORE, Check, Container, Mount
from pipeline.serving.manifests.kubernetes.cluster import REDIS_PORT, Cluster, Component, Object, quantity

USER = 1000
PACKAGES = "/packages"
# Gateways ask DNS every five seconds, and CoreDNS keeps an answer for at most 30: so long a server that is to end
# is still asked. The addresses of a Service are exchanged faster.
SERVER_LEAVES_S, GATEWAY_LEAVES_S = 40, 10
_PROBE_S, _LIVENESS_S = 5, 20
# As `pipeline gateway --max-wait-s` has it.
_GATEWAY_WAITS_S = 30
# Besides the weights: Triton, its Python models and CUDA's contexts.
_HOST_GIB, _HOST_GIB_OF_A_GPU = 8, 4
# User and group `valkey` of the image: 8.1/alpine/Dockerfile of github.com/valkey-io/valkey-container.
REDIS_IMAGE, _REDIS_USER, _REDIS_GROUP = "docker.io/valkey/valkey:8.1-alpine", 999, 1000
_REDIS_MIB = 1024
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
        container["volumeMounts"].append(_SSH_MOUNT)
    return _template(cluster, "triton", _server_spec(cluster, container))


def worker_pod(cluster: Cluster) -> Object:
    """Make the template of a pod that holds ranks of a model whose leader is another pod."""
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
    container["volumeMounts"].append(_SSH_MOUNT)
    return _template(cluster, "triton", _server_spec(cluster, container))


def gateway_pod(cluster: Cluster) -> Object:
    """Make the template of a pod with a gateway."""
    gateway = cluster.description.gateway
    semantic = cluster.options.recipe.cache.enabled and cluster.options.recipe.cache.semantic is not None
    memory = _GATEWAY_MEMORY_SEMANTIC if semantic else _GATEWAY_MEMORY
    container = _container(cluster, gateway) | {
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
        "startupProbe": _probe(gateway.alive, _PROBE_S, math.ceil(gateway.start_s / _PROBE_S)),
        # A server that is started again is waited for: so long nobody is sent away.
        "readinessProbe": _probe(gateway.ready, _PROBE_S, _GATEWAY_WAITS_S // _PROBE_S),
        "livenessProbe": _probe(gateway.alive, _LIVENESS_S, 3),
        "lifecycle": _leave(GATEWAY_LEAVES_S),
    }
    password = _from_secret("PIPELINE_CACHE_PASSWORD", cluster.secret("redis"), "password")
    container["env"] = [*container.get("env", []), password]
    spec: Object = {
        **_pod(cluster, "gateway", gateway, GATEWAY_LEAVES_S),
        **_init(cluster, gateway, without_weights=True),
        "containers": [container],
        "volumes": _volumes(cluster, gateway),
    }
    return _template(cluster, "gateway", spec)


def redis_pod(cluster: Cluster) -> Object:
    """Make the template of a pod with Redis: answers and counters, in memory only."""
    memory = f"{_REDIS_MIB}Mi"
    command = ["valkey-server", "--save", "", "--appendonly", "no", "--dir", "/data"]
    command += ["--maxmemory", f"{_REDIS_MIB * 7 // 8}mb", "--maxmemory-policy", "allkeys-lru"]
    ask = {"exec": {"command": ["valkey-cli", "ping"]}, "periodSeconds": _PROBE_S, "timeoutSeconds": 5}
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(_REDIS_USER, _REDIS_GROUP),
        "containers": [
            {
                "name": "redis",
                "image": REDIS_IMAGE,
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
                "resources": {"requests": {"cpu": "250m", "memory": memory}, "limits": {"memory": memory}},
                "readinessProbe": ask,
                "livenessProbe": {**ask, "periodSeconds": _LIVENESS_S},
                "securityContext": _security(),
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {"sizeLimit": "64Mi"}}],
    }
    return _template(cluster, "redis", spec)


def build_pod(cluster: Cluster) -> Object:
    """Make the template of a pod that builds the package on a GPU, and puts it where servers find it."""
    memory = f"{math.ceil(4 * cluster.weights_gib + 16)}Gi"
    gpus = {"nvidia.com/gpu": "1"} if cluster.description.deployment.requirements is not None else {}
    own = {
        "image": cluster.options.build_image or f"pipeline-build:{__version__}",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": _security(),
        "volumeMounts": [
            {"name": "store", "mountPath": STORE},
            {"name": "recipe", "mountPath": str(PurePosixPath(RECIPE_FILE).parent), "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "home", "mountPath": "/home/pipeline"},
        ],
    }
    build = {
        "name": "build",
        **own,
        "args": ["build", RECIPE_FILE, "--store", STORE],
        "env": [_from_secret("HF_TOKEN", cluster.secret("hub"), "token")],
        "resources": {
            "requests": {"cpu": "8", "memory": memory, **gpus},
            "limits": {"memory": memory, **gpus},
        },
    }
    push = {
        "name": "push",
        **own,
        "args": [
            "store",
            "push",
            cluster.description.package_name,
            cluster.options.packages,
            "--store",
            STORE,
        ],
        "envFrom": [_credentials(cluster)],
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
    }
    on_volume = cluster.options.packages is None
    store: Object = {"persistentVolumeClaim": {"claimName": cluster.claim}} if on_volume else {"emptyDir": {}}
    spec: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**_pod_security(), "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
        **_on_gpus(cluster),
        **({} if on_volume else {"initContainers": [build]}),
        "containers": [build if on_volume else push],
        "volumes": [
            {"name": "store", **store},
            {"name": "recipe", "configMap": {"name": f"{cluster.settings}-built"}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "home", "emptyDir": {}},
        ],
    }
    return _template(cluster, "build", spec)


def _server_spec(cluster: Cluster, container: Object) -> Object:
    """A pod around a container with ranks: on a GPU node, with the package, shared memory, and the key of a group."""
    server = cluster.description.server
    pod = _pod(cluster, "triton", server, SERVER_LEAVES_S)
    return {
        **pod,
        **_on_gpus(cluster, pod["tolerations"]),
        **_init(cluster, server, without_weights=False),
        "containers": [container],
        "volumes": [*_volumes(cluster, server), _shared_memory(server), *_ssh_volume(cluster)],
    }


def _template(cluster: Cluster, component: Component, spec: Object) -> Object:
    labels = cluster.labels(component)
    if component in ("triton", "gateway"):
        # What is rolled out, and rolled back, is this.
        labels = {**labels, "app.kubernetes.io/version": cluster.description.package_name}
    return {"metadata": {"labels": labels}, "spec": spec}


def _pod(cluster: Cluster, component: Component, container: Container, leaves_s: int) -> Object:
    apart = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": cluster.selector(component)},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]
    # A Secret's files belong to root, and to this group.
    group = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"} if cluster.nodes > 1 else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": leaves_s + container.stop_s,
        "securityContext": {**_pod_security(), **(group if component == "triton" else {})},
        "topologySpreadConstraints": apart,
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


def _on_gpus(cluster: Cluster, tolerations: Sequence[Object] = ()) -> Object:
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
    return made | {
        "ports": [{"name": name, "containerPort": port} for name, port in container.ports.items()],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _security(),
        "volumeMounts": _mounts(cluster, container),
    }


def _server_resources(cluster: Cluster) -> Object:
    resources = cluster.description.server.resources
    host_cache_gib = cluster.options.recipe.kv_cache.host_memory_gib
    gib = cluster.weights_gib / cluster.nodes + (resources.shm_mib or 0) / 1024
    gib += _HOST_GIB + _HOST_GIB_OF_A_GPU * resources.gpus + host_cache_gib
    memory = quantity(resources.memory) if resources.memory else f"{math.ceil(gib)}Gi"
    given = {"memory": memory, "ephemeral-storage": "4Gi"}
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


def _pod_security(user: int = USER, group: int = USER) -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _mounts(cluster: Cluster, container: Container) -> list[Object]:
    made: list[Object] = []
    for mount in _all_mounts(container):
        if mount.source == "package":
            folder = cluster.description.package_name
            # On a volume it lies as in any store; from an object store it is fetched into a folder of the pod's own.
            path = f"artifacts/{folder}" if cluster.options.packages is None else folder
            made.append({"name": "package", "mountPath": mount.path, "subPath": path, "readOnly": True})
        elif mount.source == "recipe":
            made.append(
                {"name": "recipe", "mountPath": str(PurePosixPath(mount.path).parent), "readOnly": True}
            )
        else:
            made.append({"name": _volume_name(mount), "mountPath": mount.path})
    if container.resources.shm_mib is not None:
        made.append({"name": "shm", "mountPath": "/dev/shm"})
    return made


def _all_mounts(container: Container) -> Sequence[Mount]:
    """The gateway keeps batches in its store also where no recipe is known."""
    if container.name == "gateway" and all(mount.source != "store" for mount in container.mounts):
        return (*container.mounts, Mount(STORE, "store", writable=True))
    return container.mounts


def _volume_name(mount: Mount) -> str:
    return mount.path.strip("/").replace("/", "-")


def _volumes(cluster: Cluster, container: Container) -> list[Object]:
    made: list[Object] = []
    for mount in _all_mounts(container):
        if mount.source == "package":
            claim = {"claimName": cluster.claim, "readOnly": True}
            size = f"{math.ceil(1.1 * cluster.weights_gib + 2) if container.name == 'triton' else 1}Gi"
            where: Object = {"persistentVolumeClaim": claim}
            made.append({"name": "package", **(where if cluster.options.packages is None else _empty(size))})
        elif mount.source == "recipe":
            made.append({"name": "recipe", "configMap": {"name": cluster.settings}})
        else:
            made.append({"name": _volume_name(mount), **_empty("2Gi")})
    return made


def _empty(size: str) -> Object:
    return {"emptyDir": {"sizeLimit": size}}


def _shared_memory(container: Container) -> Object:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{container.resources.shm_mib}Mi"}}


_SSH_MOUNT = {"name": "ssh", "mountPath": DEFAULT_KEYS, "readOnly": True}


def _ssh_volume(cluster: Cluster) -> list[Object]:
    if cluster.nodes == 1:
        return []
    return [{"name": "ssh", "secret": {"secretName": cluster.secret("ssh"), "defaultMode": 0o440}}]


def _init(cluster: Cluster, container: Container, *, without_weights: bool) -> Object:
    """Fetch the package from the object store: each file is verified while it comes."""
    packages = cluster.options.packages
    if packages is None:
        return {}
    words = ["store", "pull", cluster.description.package_name, packages, "--output", PACKAGES]
    words += ["--without-weights"] if without_weights else []
    # The entrypoint of the server's image runs a command that it is given; the gateway's is the program itself.
    program = ["pipeline"] if container.name == "triton" else []
    fetch = {
        "name": "fetch",
        "image": container.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [*program, *words],
        "envFrom": [_credentials(cluster)],
        "resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        "securityContext": _security(),
        "volumeMounts": [{"name": "package", "mountPath": PACKAGES}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {"initContainers": [fetch]}


def _credentials(cluster: Cluster) -> Object:
    return {"secretRef": {"name": cluster.secret("objects"), "optional": True}}


def _from_secret(variable: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}
