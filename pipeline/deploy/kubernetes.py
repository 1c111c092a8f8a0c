"""A deployment for Kubernetes: a base of kustomize, components that a cluster may add, and overlays.

    namespace/     what outlives every roll-out: the namespace, accounts, and the claim of the volume with the packages
    build/         a Job that builds the package on a GPU of the cluster, and puts it where servers find it
    base/          Triton, gateways, Redis, and who may talk to whom
    components/    scaling, monitoring, a way in from outside, API keys; RDMA and topology for several machines
    overlays/      plain: the base, so many servers; production: with what a cluster adds; site: yours, on top of it

Plain YAML: nothing is filled in later, and `kubectl kustomize overlays/plain` shows what is applied. Pods obey
Kubernetes' Pod Security Standard "restricted" and write nowhere but into folders that are empty at the start. No
workload says how many there are: the overlays do (`plain`), or what scales them (`production`).

    apps/v1, batch/v1, policy/v1, networking.k8s.io/v1, autoscaling/v2 of Kubernetes 1.30 and newer
    leaderworkerset.x-k8s.io/v1 (https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/) for several machines
    keda.sh/v1alpha1, monitoring.coreos.com/v1, gateway.networking.k8s.io/v1 (Gateway API 1.2) in components
"""

from __future__ import annotations

import json

import yaml
from markupsafe import Markup

from pipeline.deploy.alerts import GATEWAY_JOB, TRITON_JOB, TimeScale, rules_file
from pipeline.deploy.cluster import Cluster, make_cluster
from pipeline.deploy.dashboard import dashboard
from pipeline.deploy.package import DeployedPackage
from pipeline.deploy.templates import render, yaml_block
from pipeline.serving.launch import ServeOptions

# Folders that a person changes: what is there is not written again.
SITE = ("overlays/site/", "overlays/site-namespace/")
_QUESTIONS = "golden.jsonl"


def kubernetes_files(package: DeployedPackage, options: ServeOptions) -> dict[str, str]:
    """Write the folder that runs a package in a cluster.

    Returns:
        Path of each file, relative to the folder -> its text.

    Raises:
        UserError: No image carries its runtime.
        InvalidInput: It cannot be run in a cluster like that; all reasons.
    """
    cluster = make_cluster(package, options)
    own = cluster.settings
    rules = rules_file([cluster.recipe], TimeScale(), cluster.namespace)
    rendered = [
        "namespace/kustomization.yaml",
        "namespace/namespace.yaml",
        "namespace/accounts.yaml",
        *([] if own.packages else ["namespace/claim.yaml"]),
        *(["build/kustomization.yaml", "build/job.yaml"] if _can_build(package.recipe_text) else []),
        "base/kustomization.yaml",
        "base/server.yaml",
        "base/gateway.yaml",
        *([] if own.redis else ["base/redis.yaml"]),
        "base/network.yaml",
        "components/api-keys/kustomization.yaml",
        *(f"components/scaling/{name}.yaml" for name in ("kustomization", "server", "gateway")),
        *(f"components/monitoring/{name}.yaml" for name in ("kustomization", "monitors", "rules")),
        "overlays/plain/kustomization.yaml",
        "overlays/production/kustomization.yaml",
        *(f"{folder}kustomization.yaml" for folder in SITE),
    ]
    if own.expose is not None:
        rendered += ["components/expose/kustomization.yaml", f"components/expose/{cluster.exposing_file}"]
    if cluster.nodes > 1:
        places = (
            "components/rdma",
            "components/exclusive-topology",
            "overlays/rdma",
            "overlays/rdma-namespace",
        )
        rendered += [f"{place}/kustomization.yaml" for place in places]
    values = {
        "c": cluster,
        "gateway_job": GATEWAY_JOB,
        "triton_job": TRITON_JOB,
        "rules": Markup(yaml_block(rules).rstrip()),
    }
    files = {path: render(f"kubernetes/{path}", **values) for path in rendered}
    board = dashboard([cluster.recipe], cluster.namespace)
    files["components/monitoring/dashboard.json"] = json.dumps(board, indent=2) + "\n"
    if cluster.recipe_text is not None:
        files["base/recipe.yaml"] = cluster.recipe_text
    if package.verify_key is not None:
        files["base/packages.pem"] = package.verify_key
    if "build/job.yaml" in files:
        files |= {f"build/{name}": text for name, text in _built_recipe(cluster).items()}
    return files


def _can_build(recipe: str | None) -> bool:
    """Whether a cluster can have what the recipe is made from: folders of this machine are not there."""
    if recipe is None:
        return False
    values = yaml.safe_load(recipe)
    sources = [values["model"]["source"], (values.get("draft") or {}).get("source", "hf:")]
    return all(str(source).startswith("hf:") for source in sources)


def _built_recipe(cluster: Cluster) -> dict[str, str]:
    text, golden = cluster.package.recipe_text or "", cluster.recipe.golden
    if golden is None or cluster.questions is None:
        return {"recipe.yaml": text}
    section = golden.model_dump(mode="json") | {"file": _QUESTIONS}
    return {
        "recipe.yaml": yaml_block({**yaml.safe_load(text), "golden": section}),
        _QUESTIONS: cluster.questions,
    }
