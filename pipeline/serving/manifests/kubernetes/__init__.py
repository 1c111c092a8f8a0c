"""A deployment for Kubernetes: a base of kustomize, components that a cluster may add, and two overlays.

    namespace/     what outlives every roll-out: the namespace, and the claim of the volume with the packages
    build/         a Job that builds the package on a GPU of the cluster, and puts it where servers find it
    base/          Triton, gateways, Redis, and who may talk to whom
    components/    scaling, monitoring, a way in from outside, API keys
    overlays/      plain: the base alone; production: with all components

Plain YAML: nothing is filled in later, and `kubectl kustomize overlays/plain` shows what is applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline import __version__
from pipeline.serving.launch import ServeOptions
from pipeline.serving.manifests.description import ManifestOptions
from pipeline.serving.manifests.kubernetes.cluster import (
    Cluster,
    documents,
    dump,
    kustomization,
    make_cluster,
)
from pipeline.serving.manifests.kubernetes.components import (
    exposing_files,
    keys_files,
    monitoring_component,
    scaling_files,
)
from pipeline.serving.manifests.kubernetes.pods import build_pod
from pipeline.serving.manifests.kubernetes.workloads import (
    gateway_file,
    network_file,
    redis_file,
    server_file,
)
from pipeline.triton.deployment import Deployment

__all__ = ["kubernetes_files"]

_QUESTIONS = "golden.jsonl"


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
    components = {
        "api-keys": keys_files(cluster),
        "scaling": scaling_files(cluster),
        "monitoring": monitoring_component(cluster),
    }
    if cluster.options.expose is not None:
        components["expose"] = exposing_files(cluster, cluster.options.expose)
    folders = {
        "namespace": _namespace(cluster),
        **({"build": _build(cluster, more.recipe)} if _can_build(more.recipe) and more.recipe else {}),
        "base": _base(cluster),
        **{f"components/{name}": files for name, files in components.items()},
        "overlays/plain": _overlay(
            cluster, (), "The base alone: it needs nothing but Kubernetes and NVIDIA's GPU operator."
        ),
        "overlays/production": _overlay(
            cluster, tuple(components), "With all components: it needs KEDA and the Prometheus operator, too."
        ),
    }
    return {f"{folder}/{name}": text for folder, files in folders.items() for name, text in files.items()}


def _base(cluster: Cluster) -> dict[str, str]:
    files = {"server.yaml": server_file(cluster), "gateway.yaml": gateway_file(cluster)}
    if cluster.options.redis is None:
        files["redis.yaml"] = redis_file(cluster)
    files["network.yaml"] = network_file(cluster)
    generated: list[Mapping[str, Any]] = []
    if cluster.recipe is not None:
        generated = [{"name": cluster.settings, "files": ["recipe.yaml"]}]
    comment = f"{cluster.description.name}, as package {cluster.description.package_name}, by pipeline {__version__}."
    head = kustomization(comment, resources=list(files), configMapGenerator=generated)
    recipe = {} if cluster.recipe is None else {"recipe.yaml": cluster.recipe}
    return {"kustomization.yaml": head, **files, **recipe}


def _overlay(cluster: Cluster, components: tuple[str, ...], comment: str) -> dict[str, str]:
    return {
        "kustomization.yaml": kustomization(
            f"{comment}\nBefore: kubectl apply -k namespace/",
            namespace=cluster.options.namespace,
            resources=["../../base"],
            components=[f"../../components/{name}" for name in components],
        )
    }


def _namespace(cluster: Cluster) -> dict[str, str]:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    metadata = {"name": cluster.options.namespace, "labels": labels}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    files = {
        "namespace.yaml": documents(
            "Pods that could become more than they are made for are refused here.", namespace
        )
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
        "resources": {"requests": {"storage": f"{math.ceil(8 * cluster.weights_gib + 20)}Gi"}},
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


def _can_build(recipe: str | None) -> bool:
    """Whether a cluster can have what the recipe is made from: folders of this machine are not there."""
    if recipe is None:
        return False
    values = yaml.safe_load(recipe)
    sources = [values["model"]["source"], (values.get("draft") or {}).get("source", "hf:")]
    return all(str(source).startswith("hf:") for source in sources)


def _build(cluster: Cluster, recipe: str) -> dict[str, str]:
    package = cluster.description.package_name
    job = cluster.object(
        "batch/v1", "Job", f"{cluster.name}-build-{package.rpartition('-')[2][:10]}".lower(), "build",
        spec={"backoffLimit": 2, "ttlSecondsAfterFinished": 7 * 24 * 3600, "template": build_pod(cluster)},
    )  # fmt: skip
    where = "on the volume" if cluster.options.packages is None else f"in {cluster.options.packages}"
    comment = f"""
Builds {package} on a GPU of the cluster, and leaves it {where}. Its name is that of the package:
another recipe is another Job, and one that ran already finds everything made. The token for gated models is a Secret:
  kubectl create secret generic {cluster.secret("hub")} -n {cluster.options.namespace} --from-literal=token=hf_…
"""
    files = {"recipe.yaml": recipe}
    if (golden := cluster.options.recipe.golden) is not None and cluster.options.questions is not None:
        section = golden.model_dump(mode="json") | {"file": _QUESTIONS}
        files = {
            "recipe.yaml": dump({**yaml.safe_load(recipe), "golden": section}),
            _QUESTIONS: cluster.options.questions,
        }
    head = kustomization(
        "The package, before it can be served.\n  kubectl apply -k build/\n"
        f"  kubectl wait --namespace {cluster.options.namespace} --for=condition=complete --timeout=6h "
        f"job/{job['metadata']['name']}",
        namespace=cluster.options.namespace,
        resources=["job.yaml"],
        configMapGenerator=[{"name": f"{cluster.settings}-built", "files": list(files)}],
    )
    return {"kustomization.yaml": head, "job.yaml": documents(comment, job), **files}
