"""A deployment as a cluster sees it: names, labels, nodes, and how objects are written.

Everything that several objects must agree in is decided here, once.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pipeline.errors import Fault, InvalidInput
from pipeline.plan.artifact_sizes import ArtifactSizes
from pipeline.recipe import Recipe
from pipeline.serving.launch import ServeOptions
from pipeline.serving.manifests.description import (
    NO_CPU_IMAGE,
    DeploymentDescription,
    KubernetesOptions,
    ManifestOptions,
    Surroundings,
    describe,
)
from pipeline.serving.manifests.docker import BlockDumper
from pipeline.serving.ports import GRPC
from pipeline.triton.deployment import Deployment

Object = dict[str, Any]
Component = Literal["triton", "gateway", "redis", "build"]

REDIS_PORT = 6379
# Time that a request may wait in a gateway while no server is ready, as `pipeline gateway --max-wait-s` has it.
GATEWAY_WAITS_S = 30
# Time for which a pod that is to end still gets requests. The addresses of a Service are exchanged within seconds.
# Gateways ask DNS for servers every five seconds, CoreDNS keeps an answer for 30; and what a gateway took in until it
# was forgotten itself may have waited, so that servers go on for as long after gateways.
GATEWAY_LEAVES_S = 10
SERVER_LEAVES_S = GATEWAY_LEAVES_S + GATEWAY_WAITS_S
# Beginning of the labels and annotations of LeaderWorkerSet: its pods have /name, /worker-index and /group-key
# (api/leaderworkerset/v1/leaderworkerset_types.go).
LWS = "leaderworkerset.sigs.k8s.io"
VERIFY_FOLDER, VERIFY_FILE = "/etc/pipeline/verify", "packages.pem"
# Databases of one Redis server: cached answers, and the counters of limits.
_CACHE_DATABASE, _LIMITS_DATABASE = 0, 1
# With "-gateway" and the ordinals of pods, a name stays below the 63 characters of a label.
_LONGEST_NAME = 40
# Of a recipe without a target, in seconds.
_USUAL_ITL_S = 0.05
# With all that is around it, a pod ends within the 600 s for which the cluster autoscaler waits by default
# (--max-graceful-termination-sec).
_LEAST_ANSWER_S, _MOST_ANSWER_S = 30, 500


@dataclass(frozen=True, slots=True)
class Cluster:
    """A deployment in a cluster.

    Attributes:
        description: Its containers.
        options: What the cluster is given.
        recipe: Text of the recipe that gateways read; None where only the package is known.
    """

    description: DeploymentDescription
    options: KubernetesOptions
    recipe: str | None

    @property
    def name(self) -> str:
        """What the names of all objects begin with."""
        return resource_name(self.description.name)

    @property
    def server(self) -> str:
        """Name of the Deployment, or of the LeaderWorkerSet, of Triton."""
        return f"{self.name}-triton"

    @property
    def servers(self) -> str:
        """Name of the headless Service whose addresses are those of the servers that are ready."""
        return f"{self.name}-servers"

    @property
    def gateway(self) -> str:
        """Name of the gateway's objects."""
        return f"{self.name}-gateway"

    @property
    def redis(self) -> str:
        """Name of the objects of Redis."""
        return f"{self.name}-redis"

    @property
    def claim(self) -> str:
        """Name of the claim of the volume with the packages."""
        return f"{self.name}-store"

    @property
    def settings(self) -> str:
        """Name of the ConfigMap with the recipe."""
        return f"{self.name}-recipe"

    @property
    def verify(self) -> str:
        """Name of the ConfigMap with the public key that packages are signed with."""
        return f"{self.name}-verify"

    @property
    def builder(self) -> str:
        """Name of the ServiceAccount of the Job that builds; that of servers and gateways is `name`."""
        return f"{self.name}-build"

    @property
    def sizes(self) -> ArtifactSizes:
        """Bytes of the artifacts."""
        launch = self.description.deployment.launch
        return self.options.sizes or ArtifactSizes.of_weights(int(launch.weights_gib * 2**30))

    def secret(self, what: Literal["keys", "hub", "ssh", "objects", "redis", "postgres"]) -> str:
        """Name of a Secret, which whoever applies the manifests makes."""
        return f"{self.name}-{what}"

    @property
    def nodes(self) -> int:
        """Machines of one server."""
        return self.description.nodes

    @property
    def workload(self) -> tuple[str, str]:
        """API version and kind of what runs Triton."""
        if self.nodes > 1:
            return "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
        return "apps/v1", "Deployment"

    def selector(self, component: Component) -> dict[str, str]:
        """Labels that tell the pods of a component from all others."""
        return {"app.kubernetes.io/name": component, "app.kubernetes.io/instance": self.name}

    def labels(self, component: Component) -> dict[str, str]:
        """Labels of a component's objects."""
        return {**self.selector(component), "app.kubernetes.io/part-of": "pipeline"}

    def object(self, version: str, kind: str, name: str, component: Component, **fields: Any) -> Object:
        """Make an object."""
        metadata = {"name": name, "labels": self.labels(component)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def make_cluster(
    deployment: Deployment, package: Path, options: ServeOptions, more: ManifestOptions
) -> Cluster:
    """Describe a deployment in a cluster.

    Args:
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package; its name is that of the artifact.
        options: Ports, image and GPUs.
        more: What only a deployment that others run is given; `kubernetes` is there.

    Raises:
        UserError: No image carries its runtime.
        InvalidInput: It cannot be run in a cluster like that; all reasons.
    """
    given = more.kubernetes
    assert given is not None, "the caller asks for a cluster"
    faults = [*_faults(deployment, package, options, given)]
    if faults:
        raise InvalidInput(f"{deployment.name} in Kubernetes", faults)
    name = resource_name(deployment.name)
    redis = (given.redis or f"redis://{name}-redis:{REDIS_PORT}").rstrip("/")
    hosts = (*_hosts(f"{name}-gateway", given), *([given.hostname] if given.hostname else []))
    place = Surroundings(
        endpoint=f"dns:{name}-servers:{GRPC}",
        gateway_arguments=(
            *("--limits-redis", f"{redis}/{_LIMITS_DATABASE}"),
            *("--max-waiting", str(_max_waiting(deployment, given))),
            *("--max-wait-s", str(GATEWAY_WAITS_S)),
            *(word for host in hosts for word in ("--allowed-host", host)),
        ),
        answer_s=answer_s(deployment, given.recipe),
        wait_s=GATEWAY_WAITS_S,
        nodes=_nodes(deployment, given),
        server_names=_hosts(f"{name}-servers", given),
    )
    description = describe(deployment, package, options, more, place)
    recipe = None if more.recipe is None else _with_shared_cache(more.recipe, f"{redis}/{_CACHE_DATABASE}")
    return Cluster(description, given, recipe)


def resource_name(name: str) -> str:
    """Make a recipe's name one of Kubernetes: a DNS label that begins with a letter, and leaves room for more.

    >>> resource_name("llama-3.1-8b-fp8"), resource_name("4o")
    ('llama-3-1-8b-fp8', 'm-4o')
    """
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"m-{label}".rstrip("-")
    if len(label) <= _LONGEST_NAME:
        return label
    return f"{label[: _LONGEST_NAME - 7].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def answer_s(deployment: Deployment, recipe: Recipe) -> int:
    """Seconds that the longest answer takes, at the pace of the recipe's targets."""
    ttft_ms, itl_ms = recipe.slo.ttft_p95_ms or 0, recipe.slo.itl_p95_ms
    itl_s = _USUAL_ITL_S if itl_ms is None else itl_ms / 1e3
    wanted = math.ceil(ttft_ms / 1e3 + deployment.limits.max_output_tokens * itl_s)
    return min(max(wanted, _LEAST_ANSWER_S), _MOST_ANSWER_S)


def _max_waiting(deployment: Deployment, given: KubernetesOptions) -> int:
    """Requests that may wait in one gateway: all gateways share what the least number of servers allows."""
    slots = deployment.limits.max_concurrency * given.replicas[0]
    return max(1, math.ceil(slots * given.scaling.max_waiting / given.gateways))


def _nodes(deployment: Deployment, given: KubernetesOptions) -> int:
    gpus = 0 if deployment.requirements is None else deployment.requirements.gpus
    return max(1, math.ceil(gpus / given.gpus_per_node))


def _faults(
    deployment: Deployment, package: Path, options: ServeOptions, given: KubernetesOptions
) -> list[Fault]:
    faults = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", package.name):
        faults.append(
            Fault("is no name for a folder of a volume", key="package", value=package.name,
                  fix="letters, digits, '-', '_' and '.'; 63 at most")
        )  # fmt: skip
    if deployment.requirements is None and options.launch.image is None:
        faults.append(Fault(NO_CPU_IMAGE, key="--image", fix="name one of your own"))
    least, most = given.replicas
    if not 1 <= least <= most:
        faults.append(
            Fault(
                "are no bounds",
                key="--replicas",
                value=f"{least}:{most}",
                fix="write LEAST:MOST, such as 1:4",
            )
        )
    if options.launch.gpus:
        faults.append(
            Fault("cannot be chosen in a cluster", key="--gpus", value=",".join(map(str, options.launch.gpus)),
                  fix="leave it out: the cluster gives GPUs")
        )  # fmt: skip
    gpus = 0 if deployment.requirements is None else deployment.requirements.gpus
    if (nodes := _nodes(deployment, given)) > 1 and gpus % nodes:
        faults.append(
            Fault(f"{gpus} GPUs cannot be spread evenly", key="--gpus-per-node", value=given.gpus_per_node,
                  fix="the number of GPUs of a machine that divides them")
        )  # fmt: skip
    if given.expose is not None and given.hostname is None:
        faults.append(
            Fault(
                "needs the name by which clients come",
                key="--expose",
                value=given.expose.name,
                fix="add --hostname",
            )
        )
    return faults


def _hosts(service: str, given: KubernetesOptions) -> tuple[str, ...]:
    """Names of a Service inside of the cluster."""
    inside = (service, f"{service}.{given.namespace}", f"{service}.{given.namespace}.svc")
    return (*inside, f"{inside[-1]}.cluster.local")


def _with_shared_cache(text: str, url: str) -> str:
    """The recipe with a response cache that all gateways share, where it has one that is a file of each."""
    values = yaml.safe_load(text)
    cache = values.get("cache") or {}
    if not cache.get("enabled") or (cache.get("backend") or {}).get("kind", "sqlite") != "sqlite":
        return text
    changed = {**values, "cache": {**cache, "backend": {"kind": "redis", "url": url}}}
    return dump(changed)


def dump(value: Mapping[str, Any]) -> str:
    """Write one document of YAML."""
    text: str = yaml.dump(dict(value), Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def documents(comment: str, *objects: Object) -> str:
    """Write a file: a comment that says what it is for, and its objects.

    Args:
        comment: Lines without their marks.
        objects: In the order in which they are written.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.strip().splitlines())
    return head + "---\n".join(dump(one) for one in objects)


def service_accounts(cluster: Cluster) -> str:
    """Write a file with the accounts of pods, which is where a cluster names roles of a cloud and pull secrets.

    Args:
        cluster: The deployment in its cluster.
    """
    components: tuple[tuple[str, Component], ...] = ((cluster.name, "triton"), (cluster.builder, "build"))
    accounts = [
        cluster.object("v1", "ServiceAccount", name, component, automountServiceAccountToken=False)
        for name, component in components
    ]
    comment = """
Who servers and gateways are, which read packages, and who the Job is that writes them. They may do nothing in the
cluster, and no token of theirs is mounted. Roles of a cloud and pull secrets belong to them: overlays/site-namespace.
"""
    return documents(comment, *accounts)


def kustomization(comment: str, *, component: bool = False, **fields: Any) -> str:
    """Write a kustomization.yaml.

    Args:
        comment: What it is for, and how it is applied.
        component: Whether it changes what others made, instead of being applied by itself.
        fields: Of the file; empty ones are left out.
    """
    head = (
        {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
        if component
        else {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    )
    return documents(comment, {**head, **{name: value for name, value in fields.items() if value}})


def patch_of(kind: str, name: str, operations: Sequence[Mapping[str, Any]]) -> Object:
    """Make an entry of `patches`: operations of JSON Patch (RFC 6902) on one object.

    Args:
        kind: Of the object.
        name: Of the object.
        operations: In their order.
    """
    text: str = yaml.dump([dict(one) for one in operations], Dumper=BlockDumper, sort_keys=False, width=110)
    return {"target": {"kind": kind, "name": name}, "patch": text}
