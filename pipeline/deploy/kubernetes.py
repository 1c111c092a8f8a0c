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
import math
import re
from collections.abc import Iterator

from markupsafe import Markup

from pipeline.deploy.alerts import GATEWAY_JOB, TRITON_JOB, TimeScale, rules_file
from pipeline.deploy.cluster import REDIS_PORT, Cluster, resource_name
from pipeline.deploy.containers import (
    NO_CPU_IMAGE,
    STOP_MARGIN_S,
    DeployedPackage,
    gateway_container,
    server_container,
)
from pipeline.deploy.monitoring import dashboard
from pipeline.deploy.templates import render, yaml_block, yaml_scalar
from pipeline.errors import Fault, InvalidInput
from pipeline.recipe import GatewaySection, KubernetesSection, Recipe
from pipeline.resources import parse_yaml
from pipeline.serving.launch import ENDING_S, ServeOptions
from pipeline.serving.ports import GRPC
from pipeline.triton.deployment import Deployment

# Folders that a person changes: what is there is not written again.
SITE = ("overlays/site/", "overlays/site-namespace/")
_QUESTIONS = "golden.jsonl"
# Databases of one Redis server: cached answers, and the counters of limits.
_CACHE_DATABASE, _LIMITS_DATABASE = 0, 1
# For a recipe without a target, in seconds.
_USUAL_ITL_S = 0.05
# With all that is around it, a pod ends within the 600 s for which the cluster autoscaler waits by default
# (--max-graceful-termination-sec).
_LEAST_ANSWER_S, _MOST_ANSWER_S = 30, 500


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
    values = parse_yaml(recipe)
    sources = [values["model"]["source"], (values.get("draft") or {}).get("source", "hf:")]
    return all(str(source).startswith("hf:") for source in sources)


def _built_recipe(cluster: Cluster) -> dict[str, str]:
    text, golden = cluster.package.recipe_text or "", cluster.recipe.golden
    if golden is None or cluster.questions is None:
        return {"recipe.yaml": text}
    section = golden.model_dump(mode="json") | {"file": _QUESTIONS}
    return {
        "recipe.yaml": yaml_block({**parse_yaml(text), "golden": section}),
        _QUESTIONS: cluster.questions,
    }


def make_cluster(package: DeployedPackage, options: ServeOptions) -> Cluster:
    """Decide what a deployment in a cluster has.

    Raises:
        UserError: No image carries its runtime.
        InvalidInput: It cannot be run in a cluster like that; all reasons.
    """
    deployment, recipe = package.deployment, package.recipe
    cluster, own = recipe.kubernetes, recipe.gateway
    if faults := list(_faults(package, options)):
        raise InvalidInput(f"{deployment.name} in Kubernetes", faults)
    name = resource_name(deployment.name)
    namespace = cluster.namespace or name
    redis = (cluster.redis or f"redis://{name}-redis:{REDIS_PORT}").rstrip("/")
    hosts = (
        *_hosts(f"{name}-gateway", namespace),
        *([cluster.hostname] if cluster.hostname else []),
        *own.allowed_hosts,
    )
    longest_s, nodes = _answer_s(deployment, recipe), _nodes(deployment, cluster)
    server = server_container(
        deployment, options, stop_s=longest_s + ENDING_S + STOP_MARGIN_S, nodes=nodes,
        names=_hosts(f"{name}-servers", namespace),
    )  # fmt: skip
    # Requests share what the least number of servers allows among all gateways.
    slots = deployment.limits.max_concurrency * cluster.min_replicas
    max_waiting = max(1, math.ceil(slots * Cluster.scaling.max_waiting / cluster.gateways))
    # Some of the requests under way wait for a server yet.
    drain_s = math.ceil(own.max_wait_s) + longest_s
    values = {
        "limits_redis": f"{redis}/{_LIMITS_DATABASE}",
        "max_waiting": _changed(own, "max_waiting") or max_waiting,
        "allowed_hosts": f"[{', '.join(map(yaml_scalar, hosts))}]",
    }
    gateway = gateway_container(
        package,
        f"dns:{name}-servers:{GRPC}",
        drain_s=_changed(own, "drain_s") or drain_s,
        arguments=[part for key, value in values.items() for part in ("--set", f"gateway.{key}={value}")],
    )
    text = package.recipe_text
    text = None if text is None else _with_shared_cache(text, f"{redis}/{_CACHE_DATABASE}")
    return Cluster(package, recipe, text, cluster, server, gateway, nodes, recipe.triton.memory)


def _answer_s(deployment: Deployment, recipe: Recipe) -> int:
    """Seconds that the longest answer takes, at the pace of the recipe's targets."""
    ttft_ms, itl_ms = recipe.slo.ttft_p95_ms or 0, recipe.slo.itl_p95_ms
    itl_s = _USUAL_ITL_S if itl_ms is None else itl_ms / 1e3
    wanted = math.ceil(ttft_ms / 1e3 + deployment.limits.max_output_tokens * itl_s)
    return min(max(wanted, _LEAST_ANSWER_S), _MOST_ANSWER_S)


def _changed(section: GatewaySection, key: str) -> int | None:
    """The value of a recipe that differs from the default."""
    value: int = getattr(section, key)
    return None if value == GatewaySection.model_fields[key].default else value


def _nodes(deployment: Deployment, cluster: KubernetesSection) -> int:
    gpus = 0 if deployment.requirements is None else deployment.requirements.gpus
    return max(1, math.ceil(gpus / cluster.gpus_per_node))


def _hosts(service: str, namespace: str) -> tuple[str, ...]:
    """Names of a Service inside of the cluster."""
    inside = f"{service}.{namespace}.svc"
    return service, f"{service}.{namespace}", inside, f"{inside}.cluster.local"


def _with_shared_cache(text: str, url: str) -> str:
    """The recipe with a response cache that all gateways share, where it has one that is a file of each."""
    values = parse_yaml(text)
    cache = values.get("cache") or {}
    if not cache.get("enabled") or (cache.get("backend") or {}).get("kind", "sqlite") != "sqlite":
        return text
    return yaml_block({**values, "cache": {**cache, "backend": {"kind": "redis", "url": url}}})


def _faults(package: DeployedPackage, options: ServeOptions) -> Iterator[Fault]:
    required, cluster = package.deployment.requirements, package.recipe.kubernetes
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", package.folder.name):
        fix = "letters, digits, '-', '_' and '.'; 63 at most"
        yield Fault(
            "is not a name for a folder of a volume", key="package", value=package.folder.name, fix=fix
        )
    if required is None and options.triton.image is None:
        yield Fault(NO_CPU_IMAGE, key="triton.image", fix="name one of your own")
    if package.recipe.gateway.limits_redis is not None and cluster.redis is None:
        fix = "name the server in kubernetes.redis, without a database"
        problem = "is not what gateways in a cluster share"
        value = package.recipe.gateway.limits_redis
        yield Fault(problem, key="gateway.limits_redis", value=value, fix=fix)
    if options.gpus:
        fix, devices = "leave it out: the cluster gives GPUs", ",".join(map(str, options.gpus))
        yield Fault("cannot be chosen in a cluster", key="--gpus", value=devices, fix=fix)
    gpus, nodes = 0 if required is None else required.gpus, _nodes(package.deployment, cluster)
    if gpus % nodes:
        fix = "the number of GPUs of a machine that divides them"
        problem = f"{gpus} GPUs cannot be spread evenly"
        yield Fault(problem, key="kubernetes.gpus_per_node", value=cluster.gpus_per_node, fix=fix)
