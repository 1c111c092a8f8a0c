"""A deployment as a cluster sees it: names, addresses, sizes and times. Everything that several files must agree in."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import parse_qs, urlsplit

from pipeline import __version__
from pipeline.contracts.gpus import gpu
from pipeline.deploy.containers import (
    DeployedPackage,
    GatewayContainer,
    ScalingPolicy,
    ServerContainer,
)
from pipeline.deploy.templates import GIB, MIB
from pipeline.plan.artifact_sizes import ArtifactSizes
from pipeline.recipe import KubernetesSection, Recipe
from pipeline.resources import parse_yaml
from pipeline.serving.group import DEFAULT_KEYS, SSH_PORT
from pipeline.triton.deployment import Requirements

REDIS_PORT = 6379
# Time for which a pod that is to end still gets requests. The addresses of a Service are exchanged within seconds.
# Gateways ask DNS for servers every five seconds, CoreDNS keeps an answer for 30; and what a gateway took in until it
# was forgotten itself may have waited, so that servers go on for as long after gateways.
GATEWAY_LEAVES_S = 10
# With "-gateway" and the ordinals of pods, a name stays below the 63 characters of a label.
_LONGEST_NAME = 40
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
        recipe_text: Text of the recipe that gateways read; None where only the package is known.
        settings: Section `kubernetes` of the recipe.
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
        cache = (parse_yaml(self.recipe_text) if self.recipe_text else {}).get("cache") or {}
        backend = cache.get("backend") or {}
        parts = urlsplit(backend.get("url") or "")
        if parts.hostname not in (None, self.redis_name):
            yield parts.port or (REDIS_PORT if backend["kind"] == "redis" else _POSTGRES)
        semantic = cache.get("semantic") or {}
        models = (str(semantic.get(key) or "") for key in ("embedder", "verifier"))
        if cache.get("enabled") and any(model.startswith("hf:") for model in models):
            yield _HTTPS


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
