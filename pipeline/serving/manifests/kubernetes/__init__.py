"""A deployment for Kubernetes: a base of kustomize, components that a cluster may add, and overlays.

    namespace/     what outlives every roll-out: the namespace, accounts, and the claim of the volume with the packages
    build/         a Job that builds the package on a GPU of the cluster, and puts it where servers find it
    base/          Triton, gateways, Redis, and who may talk to whom
    components/    scaling, monitoring, a way in from outside, API keys; RDMA and topology for several machines
    overlays/      plain: the base, so many servers; production: with what a cluster adds; site: yours, on top of it

Plain YAML: nothing is filled in later, and `kubectl kustomize overlays/plain` shows what is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from pipeline import __version__
from pipeline.serving.launch import ServeOptions
from pipeline.serving.manifests.description import ManifestOptions
from pipeline.serving.manifests.kubernetes.build import build_files, can_build
from pipeline.serving.manifests.kubernetes.cluster import (
    VERIFY_FILE,
    Cluster,
    documents,
    kustomization,
    make_cluster,
    patch_of,
    service_accounts,
)
from pipeline.serving.manifests.kubernetes.components import (
    exposing_files,
    keys_files,
    monitoring_component,
    scaling_files,
)
from pipeline.serving.manifests.kubernetes.fast_network import (
    exclusive_topology_files,
    privileged_namespace_files,
    rdma_files,
)
from pipeline.serving.manifests.kubernetes.network import network_file
from pipeline.serving.manifests.kubernetes.volumes import (
    claimed_bytes,
    parse_quantity,
    quantity,
    reserved_storage,
    volumes_of,
)
from pipeline.serving.manifests.kubernetes.workloads import (
    KEPT_REVISIONS,
    gateway_file,
    redis_file,
    server_file,
)
from pipeline.triton.deployment import Deployment

__all__ = ["SITE", "kubernetes_files"]

# Folders that a person changes: what is there is not written again.
SITE = ("overlays/site/", "overlays/site-namespace/")
_HERE = Path(__file__).parent / "site"


def kubernetes_files(
    deployment: Deployment, package: Path, options: ServeOptions, more: ManifestOptions
) -> dict[str, str]:
    """Write the folder that runs a package in a cluster.

    Args:
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package; its name is that of the artifact.
        options: Image and start timeout.
        more: What only a deployment that others run is given; `kubernetes` is there.

    Returns:
        Path of each file, relative to the folder -> its text.

    Raises:
        UserError: No image carries its runtime.
        InvalidInput: It cannot be run in a cluster like that; all reasons.
    """
    cluster = make_cluster(deployment, package, options, more)
    added = {
        "api-keys": keys_files(cluster),
        "scaling": scaling_files(cluster),
        "monitoring": monitoring_component(cluster),
    }
    if cluster.options.expose is not None:
        added["expose"] = exposing_files(cluster, cluster.options.expose)
    folders = {
        "namespace": _namespace(cluster),
        **({"build": build_files(cluster, more.recipe)} if can_build(more.recipe) and more.recipe else {}),
        "base": _base(cluster),
        **{f"components/{name}": files for name, files in added.items()},
        "overlays/plain": _plain(cluster),
        "overlays/production": _overlay(
            cluster, tuple(added), "With what a cluster adds: it needs KEDA and the Prometheus operator, too."
        ),
        **_site(cluster),
    }
    if cluster.nodes > 1:
        comment = "As production, with an RDMA device for each machine, in the namespace of overlays/rdma-namespace."
        folders |= {
            "components/rdma": rdma_files(cluster),
            "components/exclusive-topology": exclusive_topology_files(cluster),
            "overlays/rdma": _overlay(cluster, (*added, "rdma"), comment),
            "overlays/rdma-namespace": privileged_namespace_files(cluster),
        }
    return {f"{folder}/{name}": text for folder, files in folders.items() for name, text in files.items()}


def _base(cluster: Cluster) -> dict[str, str]:
    files = {"server.yaml": server_file(cluster), "gateway.yaml": gateway_file(cluster)}
    if cluster.options.redis is None:
        files["redis.yaml"] = redis_file(cluster)
    files["network.yaml"] = network_file(cluster)
    generated: list[Mapping[str, Any]] = []
    read: dict[str, str] = {}
    if cluster.recipe is not None:
        generated.append({"name": cluster.settings, "files": ["recipe.yaml"]})
        read["recipe.yaml"] = cluster.recipe
    if cluster.options.verify_key is not None:
        generated.append({"name": cluster.verify, "files": [VERIFY_FILE]})
        read[VERIFY_FILE] = cluster.options.verify_key
    comment = f"{cluster.description.name}, as package {cluster.description.package_name}, by pipeline {__version__}."
    head = kustomization(comment, resources=list(files), configMapGenerator=generated)
    return {"kustomization.yaml": head, **files, **read}


def _plain(cluster: Cluster) -> dict[str, str]:
    """The base, with as many servers and gateways as were asked for."""
    _, kind = cluster.workload
    counts = (
        (kind, cluster.server, cluster.options.replicas[0]),
        ("Deployment", cluster.gateway, cluster.options.gateways),
    )
    patches = [
        patch_of(kind, name, [{"op": "add", "path": "/spec/replicas", "value": count}])
        for kind, name, count in counts
    ]
    comment = f"""
The base, with a fixed number of servers and gateways: it needs nothing but Kubernetes and NVIDIA's GPU operator.
Before: kubectl apply -k namespace/
To go over to overlays/production, whose numbers scaling holds, let `kubectl apply` forget these first: what it wrote
once and finds no longer it removes, and a workload without a number has one pod.
  kubectl kustomize base/ | kubectl -n {cluster.options.namespace} apply set-last-applied -f -
  kubectl apply -k overlays/production/
"""
    return {
        "kustomization.yaml": kustomization(
            comment, namespace=cluster.options.namespace, resources=["../../base"], patches=patches
        )
    }


def _overlay(cluster: Cluster, components: tuple[str, ...], comment: str) -> dict[str, str]:
    return {
        "kustomization.yaml": kustomization(
            f"{comment}\nBefore: kubectl apply -k namespace/",
            namespace=cluster.options.namespace,
            resources=["../../base"],
            components=[f"../../components/{name}" for name in components],
        )
    }


def _site(cluster: Cluster) -> dict[str, dict[str, str]]:
    """What a person changes: examples, all of them commented out."""
    _, kind = cluster.workload
    templates = ["template"]
    if cluster.nodes > 1:
        templates = [f"leaderWorkerTemplate/{role}Template" for role in ("leader", "worker")]
    operations = (
        ("replace", "serviceAccountName", "models-reader"),
        ("add", "priorityClassName", "inference"),
    )
    servers = [
        f"#      - {{op: {how}, path: /spec/{template}/spec/{field}, value: {value}}}\n"
        for template in templates
        for how, field, value in operations
    ]
    values = {
        "namespace": cluster.options.namespace,
        "name": cluster.name,
        "kind": kind,
        "servers": "".join(servers),
    }
    workloads = (_HERE / "workloads.yaml").read_text(encoding="utf-8")
    if cluster.options.packages is not None and cluster.nodes == 1:
        workloads += (_HERE / "disk.yaml").read_text(encoding="utf-8")
        volumes = volumes_of(cluster, cluster.description.server)
        others = [volume for volume in volumes if volume["name"] != "package"]
        (package,) = (volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "package")
        values |= {"rest": reserved_storage(others), "package": quantity(parse_quantity(package))}
    namespace = (_HERE / "namespace.yaml").read_text(encoding="utf-8")
    return {
        folder.rstrip("/"): {"kustomization.yaml": Template(text).substitute(values)}
        for folder, text in zip(SITE, (workloads, namespace), strict=True)
    }


def _namespace(cluster: Cluster) -> dict[str, str]:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    metadata = {"name": cluster.options.namespace, "labels": labels}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    files = {
        "namespace.yaml": documents(
            "Pods that could become more than they are made for are refused here.", namespace
        ),
        "accounts.yaml": service_accounts(cluster),
    }
    if cluster.options.packages is None:
        files["claim.yaml"] = _claim(cluster)
    comment = """
What outlives every roll-out. Applied once; who deletes it deletes all packages.
  kubectl apply -k namespace/
"""
    head = kustomization(comment, namespace=cluster.options.namespace, resources=list(files))
    return {"kustomization.yaml": head, **files}


def _claim(cluster: Cluster) -> str:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        # Checkpoints as they were fetched and calibrated, engines, and packages of roll-outs before.
        "resources": {"requests": {"storage": quantity(claimed_bytes(cluster, KEPT_REVISIONS))}},
    }
    if cluster.options.storage_class is not None:
        spec["storageClassName"] = cluster.options.storage_class
    claim = cluster.object("v1", "PersistentVolumeClaim", cluster.claim, "build", spec=spec)
    comment = """
The store: each package lies below artifacts/ under a name that has its digest, and is never changed. Servers and
gateways on several nodes read it. What a Deployment may still go back to stays: nothing here is removed but by
`pipeline store gc --keep PACKAGE`.
"""
    return documents(comment, claim)
