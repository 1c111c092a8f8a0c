"""A deployment as a cluster sees it: names, addresses, sizes and times. Everything that several files must agree in."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import parse_qs, urlsplit

import yaml

from pipeline import __version__
from pipeline.contracts.gpus import gpu
from pipeline.deploy.containers import (
    NO_CPU_IMAGE,
    STOP_MARGIN_S,
    GatewayContainer,
    ServerContainer,
    gateway_container,
    server_container,
)
from pipeline.deploy.package import DeployedPackage, ScalingPolicy
from pipeline.deploy.templates import GIB, MIB, yaml_block, yaml_scalar
from pipeline.errors import Fault, InvalidInput
from pipeline.plan.artifact_sizes import ArtifactSizes
from pipeline.recipe import GatewaySection, KubernetesSection, Recipe
from pipeline.serving.group import DEFAULT_KEYS, SSH_PORT
from pipeline.serving.launch import ENDING_S, ServeOptions
from pipeline.serving.ports import GRPC
from pipeline.triton.deployment import Deployment, Requirements

REDIS_PORT = 6379
# Time for which a pod that is to end still gets requests. The addresses of a Service are exchanged within seconds.
# Gateways ask DNS for servers every five seconds, CoreDNS keeps an answer for 30; and what a gateway took in until it
# was forgotten itself may have waited, so that servers go on for as long after gateways.
GATEWAY_LEAVES_S = 10
# Databases of one Redis server: cached answers, and the counters of limits.
_CACHE_DATABASE, _LIMITS_DATABASE = 0, 1
# With "-gateway" and the ordinals of pods, a name stays below the 63 characters of a label.
_LONGEST_NAME = 40
# For a recipe without a target, in seconds.
_USUAL_ITL_S = 0.05
# With all that is around it, a pod ends within the 600 s for which the cluster autoscaler waits by default
# (--max-graceful-termination-sec).
_LEAST_ANSWER_S, _MOST_ANSWER_S = 30, 500
# Packages that were served before, to which `kubectl rollout undo` goes back.
_KEPT_REVISIONS = 5
# Besides the weights: Triton, its Python models and CUDA's contexts.
_HOST_GIB, _HOST_GIB_PER_GPU = 8, 4
# /tmp and home of a container: logs of Triton, uploads under way, kernels that are compiled at the start.
_SCRATCH = 2 * GIB
# A package without its weights: tokenizers, configurations, sources of models.
_WITHOUT_WEIGHTS = GIB
# Graphs of a sentence encoder and of a cross-encoder, and the checkpoints that they are made from.
_ENCODERS = 4 * GIB
# For a build: what ModelOpt and torch compile and unpack, and the Hub's own cache, with calibration sets.
_BUILD_SCRATCH, _BUILD_HOME = 8 * GIB, 16 * GIB
_HTTPS, _POSTGRES = 443, 5432
# Where pods that have no Secret with credentials ask for those of their node or ServiceAccount.
# AWS: instance metadata, and the EKS Pod Identity agent (docs.aws.amazon.com/eks, pod-id-agent-setup); roles of a
# ServiceAccount (IRSA) come from STS, by HTTPS. Google: the metadata server of GKE, with Dataplane V2 and without
# (cloud.google.com/kubernetes-engine, workload identity and network policy). Azure: instance metadata; workload
# identities come by HTTPS.
_METADATA = {
    "s3": (("169.254.169.254/32", (80,)), ("169.254.170.23/32", (80,)), ("fd00:ec2::23/128", (80,))),
    "gs": (("169.254.169.254/32", (80, 8080)), ("169.254.169.252/32", (987, 988))),
    "az": (("169.254.169.254/32", (80,)),),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A deployment in a cluster. Sizes are in bytes.

    Attributes:
        package: The package that it serves.
        recipe: Recipe that it is served with.
        recipe_text: Text of the recipe that gateways read; None where only the package is known.
        settings: Section `kubernetes` of the recipe.
        server: Triton.
        gateway: OpenAI's API.
        nodes: Machines of one server.
        memory: Most host memory of Triton as Docker writes it ("64G"); None for what the weights need.
    """

    package: DeployedPackage
    recipe: Recipe
    recipe_text: str | None
    settings: KubernetesSection
    server: ServerContainer
    gateway: GatewayContainer
    nodes: int
    memory: str | None

    scaling = ScalingPolicy()
    kept_revisions = _KEPT_REVISIONS
    gateway_leaves_s = GATEWAY_LEAVES_S
    redis_port, ssh_port, ssh_keys = REDIS_PORT, SSH_PORT, DEFAULT_KEYS
    redis_folders: ClassVar[dict[str, int]] = {"data": 64 * MIB}
    # The APIs of OpenAI, Anthropic and Azure, which ask for keys.
    public_paths = ("/v1", "/openai")

    # Names.

    @property
    def name(self) -> str:
        """Beginning of the names of all objects; also the ServiceAccount of servers and gateways."""
        return resource_name(self.package.name)

    @property
    def namespace(self) -> str:
        return self.settings.namespace or self.name

    @property
    def server_name(self) -> str:
        """Name of the Deployment, or of the LeaderWorkerSet, of Triton."""
        return f"{self.name}-triton"

    @property
    def servers(self) -> str:
        """Name of the headless Service whose addresses are those of the servers that are ready."""
        return f"{self.name}-servers"

    @property
    def gateway_name(self) -> str:
        return f"{self.name}-gateway"

    @property
    def redis_name(self) -> str:
        return f"{self.name}-redis"

    @property
    def claim(self) -> str:
        """Name of the claim of the volume with the packages."""
        return f"{self.name}-store"

    @property
    def recipe_name(self) -> str:
        """Name of the ConfigMap with the recipe that gateways read."""
        return f"{self.name}-recipe"

    @property
    def built_recipe_name(self) -> str:
        """Name of the ConfigMap with the recipe that is built."""
        return f"{self.name}-recipe-built"

    @property
    def verify(self) -> str:
        """Name of the ConfigMap with the public key that packages are signed with."""
        return f"{self.name}-verify"

    @property
    def builder(self) -> str:
        """Name of the ServiceAccount of the Job that builds."""
        return f"{self.name}-build"

    @property
    def job(self) -> str:
        """Name of the Job that builds: that of the package is a part of it."""
        return f"{self.name}-build-{self.package.folder.name.rpartition('-')[2][:10]}".lower()

    def secret(self, purpose: Literal["keys", "hub", "ssh", "objects", "redis", "postgres"]) -> str:
        """Name of a Secret, which whoever applies the manifests makes."""
        return f"{self.name}-{purpose}"

    @property
    def workload(self) -> str:
        """Kind of the object that runs Triton."""
        return "LeaderWorkerSet" if self.nodes > 1 else "Deployment"

    @property
    def workload_version(self) -> str:
        return "leaderworkerset.x-k8s.io/v1" if self.nodes > 1 else "apps/v1"

    @property
    def pod_templates(self) -> list[str]:
        """Paths of the pod templates in the object that runs Triton."""
        roles = ("leader", "worker")
        return (
            [f"/spec/leaderWorkerTemplate/{role}Template" for role in roles]
            if self.nodes > 1
            else ["/spec/template"]
        )

    # The package and its build.

    @property
    def required(self) -> Requirements | None:
        return self.package.deployment.requirements

    @property
    def least_gpu_mib(self) -> int:
        """Memory of the GPU, less what differs between machines."""
        assert self.required is not None, "the template asks for a deployment for a GPU alone"
        return math.floor(0.98 * gpu(self.required.gpu).driver_mib)

    @property
    def package_path(self) -> str:
        """Path of the package in its volume."""
        folder = self.package.folder.name
        return folder if self.settings.packages else f"artifacts/{folder}"

    @property
    def fetch_arguments(self) -> list[str]:
        """Arguments of `pipeline` that fetch the package, held against its digest where that is known."""
        content = "" if self.package.content is None else f"@sha256:{self.package.content}"
        named = self.package.folder.name + content
        return ["store", "pull", named, str(self.settings.packages), "--output", "/packages"]

    @property
    def build_image(self) -> str:
        return self.settings.build_image or f"pipeline-build:{__version__}"

    @property
    def questions(self) -> str | None:
        """Text of the golden questions, where a build in the cluster asks them."""
        return self.package.questions if self.recipe.golden is not None else None

    # Memory and disks.

    @property
    def package_sizes(self) -> ArtifactSizes:
        launch = self.package.deployment.launch
        return self.package.sizes or ArtifactSizes.of_weights(int(launch.weights_gib * GIB))

    @property
    def claimed_bytes(self) -> int:
        """Size of the volume with the store: what one build leaves, and packages that were served before."""
        return self.package_sizes.build + _KEPT_REVISIONS * self.package_sizes.package

    @property
    def server_memory(self) -> str:
        if self.memory is not None:
            # "64G" of Docker and systemd is 64Gi here.
            return f"{self.memory}i"
        gib = self.package_sizes.weights / GIB / self.nodes + self.server.shm_mib / 1024
        gib += _HOST_GIB + _HOST_GIB_PER_GPU * self.server.gpus + self.recipe.kv_cache.host_memory_gib
        return f"{math.ceil(gib)}Gi"

    @property
    def semantic(self) -> bool:
        """Whether gateways look for near questions, and so have encoders."""
        return self.recipe.cache.enabled and self.recipe.cache.semantic is not None

    @property
    def gateway_memory(self) -> str:
        return "4Gi" if self.semantic else "2Gi"

    @property
    def server_folders(self) -> dict[str, int]:
        """Folders of a server that are empty at the start, on the node's disk: name -> most bytes."""
        package = {"package": self.package_sizes.package} if self.settings.packages else {}
        return package | self.folders_without_package

    @property
    def folders_without_package(self) -> dict[str, int]:
        return {"tmp": _SCRATCH, "home-pipeline": _SCRATCH}

    @property
    def gateway_folders(self) -> dict[str, int]:
        """As `server_folders`; a gateway keeps nothing but encoders itself, all else is on servers."""
        package = {"package": _WITHOUT_WEIGHTS} if self.settings.packages else {}
        store = {"store": _ENCODERS} if self.semantic and self.recipe_text is not None else {}
        return package | {"tmp": _SCRATCH} | store

    @property
    def build_folders(self) -> dict[str, int]:
        """As `server_folders`, for the Job that builds."""
        store = {"store": self.package_sizes.build} if self.settings.packages else {}
        return store | {"scratch": _BUILD_SCRATCH, "home": _BUILD_HOME}

    # Times and numbers.

    @property
    def gateway_waits_s(self) -> int:
        """Time that a request may wait in a gateway while no server is ready."""
        return math.ceil(self.recipe.gateway.max_wait_s)

    @property
    def server_leaves_s(self) -> int:
        return GATEWAY_LEAVES_S + self.gateway_waits_s

    @property
    def startup_failures(self) -> int:
        """Probes, every five seconds, until a server that is not ready is started again; a group starts twice."""
        return math.ceil(((2 if self.nodes > 1 else 1) * self.server.start_s + 60) / 5)

    @property
    def progress_deadline_s(self) -> int:
        return math.ceil(2 * self.server.start_s) + 1800

    @property
    def requests_per_server(self) -> float:
        """Running and waiting requests of one server that scaling aims at."""
        return self.package.deployment.limits.max_concurrency * self.scaling.requests

    @property
    def most_gateways(self) -> int:
        return max(2 * self.settings.gateways, math.ceil(self.settings.max_replicas / 4))

    # Addresses.

    @property
    def exposing_file(self) -> str:
        assert self.settings.expose is not None, "the template is rendered for an exposed gateway alone"
        return "ingress.yaml" if self.settings.expose.startswith("ingress:") else "http-route.yaml"

    @property
    def exposing_name(self) -> str:
        """Class of the Ingress; or the Gateway, as name or namespace/name."""
        return (self.settings.expose or "").partition(":")[2]

    @property
    def monitoring_namespace(self) -> str:
        """Namespace of Prometheus: the second part of the name of its Service."""
        parts = (urlsplit(self.settings.prometheus).hostname or "").split(".")
        return parts[1] if len(parts) > 1 and parts[1] else "monitoring"

    @property
    def package_addresses(self) -> list[tuple[str | None, tuple[int, ...]]]:
        """Networks and ports of the object store, and of where its credentials come from; None is any network."""
        if self.settings.packages is None:
            return []
        parts = urlsplit(self.settings.packages)
        for endpoint in parse_qs(parts.query).get("endpoint", []):
            parts = urlsplit(endpoint)
        port = parts.port or {"http": 80}.get(parts.scheme, _HTTPS)
        return [(None, (port,)), *_METADATA.get(parts.scheme, ())]

    @property
    def cache_ports(self) -> Iterator[int]:
        """Ports of a Redis server that is not part of the manifests, of the recipe's cache, and of the Hub."""
        if self.settings.redis is not None:
            yield urlsplit(self.settings.redis).port or REDIS_PORT
        cache = (yaml.safe_load(self.recipe_text) if self.recipe_text else {}).get("cache") or {}
        backend = cache.get("backend") or {}
        parts = urlsplit(backend.get("url") or "")
        if parts.hostname not in (None, self.redis_name):
            yield parts.port or (REDIS_PORT if backend["kind"] == "redis" else _POSTGRES)
        semantic = cache.get("semantic") or {}
        models = (str(semantic.get(key) or "") for key in ("embedder", "verifier"))
        if cache.get("enabled") and any(model.startswith("hf:") for model in models):
            yield _HTTPS


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
    longest_s, nodes = answer_s(deployment, recipe), _nodes(deployment, cluster)
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


def _changed(section: GatewaySection, key: str) -> int | None:
    """The value of a recipe that says another one than the default."""
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
    values = yaml.safe_load(text)
    cache = values.get("cache") or {}
    if not cache.get("enabled") or (cache.get("backend") or {}).get("kind", "sqlite") != "sqlite":
        return text
    return yaml_block({**values, "cache": {**cache, "backend": {"kind": "redis", "url": url}}})


def _faults(package: DeployedPackage, options: ServeOptions) -> Iterator[Fault]:
    required, cluster = package.deployment.requirements, package.recipe.kubernetes
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", package.folder.name):
        fix = "letters, digits, '-', '_' and '.'; 63 at most"
        yield Fault("is no name for a folder of a volume", key="package", value=package.folder.name, fix=fix)
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
