"""Volumes of pods, where containers see them, and the storage that a pod reserves for them.

A kubelet evicts a pod when an emptyDir exceeds its `sizeLimit`, or when the writable layers, logs and emptyDirs on disk
of all its containers together exceed the sum of the containers' limits of `ephemeral-storage`; an emptyDir in memory
counts to the memory of the containers that write it (pkg/kubelet/eviction/eviction_manager.go, localStorageEviction;
https://kubernetes.io/docs/concepts/storage/ephemeral-storage/). So limits are made of the volumes that they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath

from pipeline.serving.group import DEFAULT_KEYS
from pipeline.serving.manifests.description import RECIPE_FILE, STORE, Container, Mount
from pipeline.serving.manifests.kubernetes.cluster import VERIFY_FOLDER, Cluster, Object

PACKAGES = "/packages"
_MIB, _GIB = 2**20, 2**30
# Logs that the kubelet keeps of a container (five files of 10 MiB by default), and what a container writes besides.
_LOGS = _GIB
# /tmp and home of a container: logs of Triton, uploads under way, kernels that are compiled at the start.
_SCRATCH = 2 * _GIB
# A package without its weights: tokenizers, configurations, sources of models.
_WITHOUT_WEIGHTS = _GIB
# Graphs of a sentence encoder and of a cross-encoder, and the checkpoints that they are made from.
_ENCODERS = 4 * _GIB
# Of a build: what ModelOpt and torch compile and unpack, and the Hub's own cache, with calibration sets.
_BUILD_SCRATCH, _BUILD_HOME = 8 * _GIB, 16 * _GIB
_REDIS_DATA = 64 * _MIB
_UNITS = {"Ki": 2**10, "Mi": _MIB, "Gi": _GIB, "Ti": 2**40}


def quantity(size: int) -> str:
    """Write a number of bytes as Kubernetes does, rounded up.

    >>> quantity(3 * 2**30 - 1), quantity(64 * 2**20)
    ('3Gi', '64Mi')
    """
    unit, scale = ("Gi", _GIB) if size >= _GIB else ("Mi", _MIB)
    return f"{math.ceil(size / scale)}{unit}"


def parse_quantity(text: str) -> int:
    """Read a number of bytes.

    >>> parse_quantity("3Gi"), parse_quantity("512Mi")
    (3221225472, 536870912)
    """
    return int(text[:-2]) * _UNITS[text[-2:]]


def reserved_storage(volumes: Sequence[Object]) -> str:
    """Sum what a pod may write to its node's disk: the request and the limit of `ephemeral-storage`.

    Args:
        volumes: of the pod.
    """
    on_disk = (volume["emptyDir"] for volume in volumes if "emptyDir" in volume)
    sizes = (parse_quantity(one["sizeLimit"]) for one in on_disk if one.get("medium") != "Memory")
    return quantity(sum(sizes) + _LOGS)


def volumes_of(cluster: Cluster, container: Container) -> list[Object]:
    """List the volumes of a pod around a container of a deployment."""
    made: list[Object] = []
    for mount in _mounts(cluster, container):
        name = _volume_name(mount)
        if mount.source == "package":
            made.append({"name": "package", **_package_volume(cluster, container)})
        elif mount.source == "recipe":
            made.append({"name": "recipe", "configMap": {"name": cluster.settings}})
        else:
            made.append({"name": name, **_empty(_ENCODERS if name == "store" else _SCRATCH)})
    if container.resources.shm_mib is not None:
        size = f"{container.resources.shm_mib}Mi"
        made.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if cluster.nodes > 1 and container.name == "triton":
        made.append({"name": "ssh", "secret": {"secretName": cluster.secret("ssh"), "defaultMode": 0o440}})
    if cluster.options.verify_key is not None and container.name == "triton":
        made.append(verify_volume(cluster))
    return made


def mounts_of(cluster: Cluster, container: Container) -> list[Object]:
    """List where a container of a deployment sees its volumes."""
    made: list[Object] = []
    for mount in _mounts(cluster, container):
        if mount.source == "package":
            folder = cluster.description.package_name
            # On a volume it lies as in any store; from an object store it is fetched into a folder of the pod's own.
            path = f"artifacts/{folder}" if cluster.options.packages is None else folder
            made.append({"name": "package", "mountPath": mount.path, "subPath": path, "readOnly": True})
        elif mount.source == "recipe":
            place = str(PurePosixPath(mount.path).parent)
            made.append({"name": "recipe", "mountPath": place, "readOnly": True})
        else:
            made.append({"name": _volume_name(mount), "mountPath": mount.path})
    if container.resources.shm_mib is not None:
        made.append({"name": "shm", "mountPath": "/dev/shm"})
    if cluster.nodes > 1 and container.name == "triton":
        made.append({"name": "ssh", "mountPath": DEFAULT_KEYS, "readOnly": True})
    if cluster.options.verify_key is not None and container.name == "triton":
        made.append(VERIFY_MOUNT)
    return made


def fetch_mounts(cluster: Cluster) -> list[Object]:
    """List where the container that fetches a package sees the volumes of its pod."""
    made: list[Object] = [{"name": "package", "mountPath": PACKAGES}, {"name": "tmp", "mountPath": "/tmp"}]
    return made if cluster.options.verify_key is None else [*made, VERIFY_MOUNT]


VERIFY_MOUNT: Object = {"name": "verify", "mountPath": VERIFY_FOLDER, "readOnly": True}


def verify_volume(cluster: Cluster) -> Object:
    """The public key that signatures of packages are held against."""
    return {"name": "verify", "configMap": {"name": cluster.verify}}


def build_volumes(cluster: Cluster) -> list[Object]:
    """List the volumes of the pod that builds."""
    on_volume: Object = {"persistentVolumeClaim": {"claimName": cluster.claim}}
    return [
        {
            "name": "store",
            **(on_volume if cluster.options.packages is None else _empty(cluster.sizes.build)),
        },
        {"name": "recipe", "configMap": {"name": f"{cluster.settings}-built"}},
        {"name": "scratch", **_empty(_BUILD_SCRATCH)},
        {"name": "home", **_empty(_BUILD_HOME)},
    ]


def build_mounts() -> list[Object]:
    """List where containers of that pod see them."""
    return [
        {"name": "store", "mountPath": STORE},
        {"name": "recipe", "mountPath": str(PurePosixPath(RECIPE_FILE).parent), "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "home", "mountPath": "/home/pipeline"},
    ]


def redis_volumes() -> list[Object]:
    """List the volumes of the pod with Redis."""
    return [{"name": "data", **_empty(_REDIS_DATA)}]


def claimed_bytes(cluster: Cluster, packages: int) -> int:
    """Size of the volume with the store: what one build leaves, and packages that were served before.

    Args:
        cluster: The deployment in its cluster.
        packages: How many of them.
    """
    return cluster.sizes.build + packages * cluster.sizes.package


def _mounts(cluster: Cluster, container: Container) -> Sequence[Mount]:
    """Leave out the store of gateways where no near question is looked for: all else that they keep is on servers."""
    cache = cluster.options.recipe.cache
    if cache.enabled and cache.semantic is not None:
        return container.mounts
    return [mount for mount in container.mounts if mount.source != "store"]


def _volume_name(mount: Mount) -> str:
    return mount.path.strip("/").replace("/", "-")


def _package_volume(cluster: Cluster, container: Container) -> Object:
    if cluster.options.packages is None:
        return {"persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}}
    return _empty(cluster.sizes.package if container.name == "triton" else _WITHOUT_WEIGHTS)


def _empty(size: int) -> Object:
    return {"emptyDir": {"sizeLimit": quantity(size)}}
