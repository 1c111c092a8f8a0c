"""What a deployment consists of, whoever runs it: its containers, with all that goes into them.

`describe` makes one value from the package, the options and where it will run; each renderer (`docker`, `systemd`,
`kubernetes`) writes that value in its own format and decides nothing about the containers. Pure; nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline import __version__
from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.serving.launch import ENDING_S, HostGroup, ServeOptions
from pipeline.serving.launch_gpu import CHECKED, GpuPlace, plan_launch
from pipeline.serving.ports import GRPC, HTTP, METRICS
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

if TYPE_CHECKING:
    from pipeline.plan.artifact_sizes import ArtifactSizes
    from pipeline.recipe import Recipe

GATEWAY_PORT = 8080  # in the container
RECIPE_FILE = "/etc/pipeline/recipe.yaml"
PYTHON = "/opt/pipeline/bin/python"
STORE = "/store"
HOME = "/home/pipeline"
NO_CPU_IMAGE = "no image carries that runtime: pipeline serve runs it, --target systemd makes it a service"
# For the supervisor, after the server has ended; a container that is not done then is killed.
_STOP_MARGIN_S = 15
_STOP_S = 60


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """What a deployment that others run is given, besides `ServeOptions`.

    Attributes:
        gateway_port: Where the gateway listens, on the address of `ServeOptions`.
        gateway_image: Image of the gateway; None for the one of our Dockerfile.
        memory: Hard limit of the host's memory as Docker and systemd write it ("64G"); None for none.
        recipe: The recipe, all values resolved, as YAML; None where only the package is known.
        user: Whose process the unit is.
        program: Words that start `pipeline` on this machine.
        kubernetes: What only a cluster is given.
    """

    gateway_port: int = 8080
    gateway_image: str | None = None
    memory: str | None = None
    recipe: str | None = None
    user: str = "pipeline"
    program: tuple[str, ...] = ("pipeline",)
    kubernetes: KubernetesOptions | None = None


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """What a deployment in a cluster is given, besides `ManifestOptions`.

    Attributes:
        recipe: That it is served with; of a package alone, what the package says.
        namespace: Where everything lies.
        replicas: Least and most servers, or groups of servers.
        gateways: Least number of gateways.
        gpus_per_node: GPUs of one machine; a model that needs more is spread over several.
        hostname: Name by which clients outside reach the gateway; None for none.
        expose: What leads them there: an Ingress of a class, or an HTTPRoute of a Gateway; None for nothing.
        packages: Address of the object store with the packages; None for a volume.
        build_image: Image of the Job that builds; None for the one of our Dockerfile.
        storage_class: Of the volume; None for the cluster's default.
        redis: Address of a Redis server; None for one of its own.
        prometheus: URL of the Prometheus server that scaling asks.
        runbook_url: Page that alerts link to.
        questions: Text of the recipe's golden questions, for a build in the cluster; None for none.
        scaling: When servers are added and taken away.
        sizes: Bytes of the recipe's artifacts; None where only the weights of the package are known.
        content: SHA-256 (hex) of the package's manifest, which has those of all its files; None while it is not built.
        verify_key: Public key that signatures of packages are held against, as PEM; None takes unsigned ones.
    """

    recipe: Recipe
    namespace: str
    replicas: tuple[int, int] = (1, 4)
    gateways: int = 2
    gpus_per_node: int = 8
    hostname: str | None = None
    expose: Exposure | None = None
    packages: str | None = None
    build_image: str | None = None
    storage_class: str | None = None
    redis: str | None = None
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    runbook_url: str = "how-to/alerts.html"
    questions: str | None = None
    scaling: ScalingPolicy = field(default_factory=lambda: ScalingPolicy())
    sizes: ArtifactSizes | None = None
    content: str | None = None
    verify_key: str | None = None


@dataclass(frozen=True, slots=True)
class Exposure:
    """What leads clients outside of the cluster to the gateway.

    Attributes:
        kind: An Ingress, or an HTTPRoute of the Gateway API.
        name: The class of the Ingress; or the Gateway, as name or namespace/name.
    """

    kind: Literal["ingress", "gateway"]
    name: str


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """When servers are added and taken away. The one place of these numbers.

    Attributes:
        requests: Requests that run and wait, as a share of those that a server answers at once, that are aimed at.
        spare: Servers on top of those that the requests ask for.
        queue_time: Wait for a slot (p95), as a share of the target of the time to first token (p95).
        kv_cache: Share of the KV cache in use.
        interval_s: Time from one look to the next.
        up_window_s: Time for which the least demand of all looks counts before servers are added.
        up_percent: Most servers that are added in a minute, in percent of those there are; or else `up_pods`.
        up_pods: See `up_percent`; the larger counts.
        down_window_s: Time for which the greatest demand counts before servers are taken away.
        down_percent: Most servers that are taken away in a minute, in percent; or else `down_pods`.
        down_pods: See `down_percent`; the larger counts.
        max_waiting: Requests that may wait in all gateways, as a share of those that the least number of servers
            answers at once; more get 429.
        lost_node_s: Time after which pods of a node that does not answer are made anew elsewhere.
        gateway_cpu: Mean use of the processors that gateways request, in percent, above which some are added.
    """

    requests: float = 0.7
    spare: int = 1
    queue_time: float = 0.5
    kv_cache: float = 0.8
    interval_s: int = 15
    up_window_s: int = 0
    up_percent: int = 100
    up_pods: int = 4
    down_window_s: int = 600
    down_percent: int = 10
    down_pods: int = 1
    max_waiting: float = 0.25
    lost_node_s: int = 30
    gateway_cpu: int = 70


@dataclass(frozen=True, slots=True)
class Mount:
    """What a container sees under a path.

    Attributes:
        path: In the container.
        source: The package; the recipe's file; the folder of artifacts, caches and batches; or a folder that is empty
            at the start and gone at the end.
        writable: Whether the container may change it.
        executable: Whether programs may be run from it.
    """

    path: str
    source: Literal["package", "recipe", "store", "scratch"]
    writable: bool = False
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """How to find out whether a container is well: a command that exits with 0, or a path that answers 200."""

    command: tuple[str, ...] = ()
    path: str = ""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a container is given.

    Attributes:
        gpus: Of its machine.
        devices: Which ones, by the driver's numbers; empty for any.
        memory: Hard limit as Docker and systemd write it ("64G"); None for none.
        shm_mib: Size of /dev/shm; None for the usual one.
        ulimits: Name -> soft and hard limit; -1 is none.
    """

    gpus: int = 0
    devices: tuple[int, ...] = ()
    memory: str | None = None
    shm_mib: int | None = None
    ulimits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Container:
    """One container.

    Attributes:
        name: Of the service.
        image: With its tag, or its digest where that was given.
        arguments: Of the image's own entrypoint.
        environment: Besides that of the image.
        ports: Name -> port that it listens on.
        mounts: What it sees; all else is read-only.
        ready: Whether it can be asked.
        alive: Whether it can be left alone.
        start_s: Time to become ready.
        stop_s: Time from the request to stop until it is killed.
        resources: What it is given.
    """

    name: str
    image: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    ports: Mapping[str, int]
    mounts: tuple[Mount, ...]
    ready: Check
    alive: Check
    start_s: float
    stop_s: int
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a deployment will run, as far as its containers depend on it.

    Attributes:
        endpoint: Triton's gRPC, as the gateway names it.
        gateway_arguments: Further ones of the gateway.
        answer_s: Time of the longest answer, which a server that is to end leaves to requests under way; None for what
            suits most models.
        wait_s: Time for which a request may wait in a gateway before it is sent to a server.
        nodes: Machines that share the ranks of one server.
        server_names: Names by which clients call the server.
    """

    endpoint: str = f"triton:{GRPC}"
    gateway_arguments: tuple[str, ...] = ()
    answer_s: int | None = None
    wait_s: int = 0
    nodes: int = 1
    server_names: tuple[str, ...] = ("triton",)

    @property
    def server_stop_s(self) -> int:
        """Time from the request to stop until the server is killed: the longest answer, and the end of processes."""
        return _STOP_S if self.answer_s is None else self.answer_s + ENDING_S + _STOP_MARGIN_S

    @property
    def gateway_drain_s(self) -> int | None:
        """Time that a gateway leaves to requests under way: some of them wait for a server yet."""
        return None if self.answer_s is None else self.wait_s + self.answer_s

    @property
    def gateway_stop_s(self) -> int:
        """Time from the request to stop until the gateway is killed."""
        return _STOP_S if self.gateway_drain_s is None else self.gateway_drain_s + _STOP_MARGIN_S


@dataclass(frozen=True, slots=True)
class DeploymentDescription:
    """A deployment: Triton, and the gateway in front of it.

    Attributes:
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package on this machine; its name is that of the artifact.
        options: Ports, address, image and GPUs.
        more: What only a deployment that others run is given.
        server: Triton, below the supervisor that starts it again.
        gateway: OpenAI's API.
        nodes: Machines that share the ranks of one server.
    """

    deployment: Deployment
    package: Path
    options: ServeOptions
    more: ManifestOptions
    server: Container
    gateway: Container
    nodes: int = 1

    @property
    def name(self) -> str:
        """Of the recipe."""
        return self.deployment.name

    @property
    def package_name(self) -> str:
        """Of the artifact, which has the beginning of its digest; of another folder, its own name."""
        return self.package.name


def describe(
    deployment: Deployment,
    package: Path,
    options: ServeOptions,
    more: ManifestOptions,
    place: Surroundings | None = None,
) -> DeploymentDescription:
    """Describe a deployment in containers.

    Args:
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package.
        options: Ports, address, image and GPUs.
        more: What only a deployment that others run is given.
        place: Where it will run; None for one machine.

    Raises:
        UserError: No image carries its runtime.
        InvalidInput: It cannot be started like that; all reasons.
    """
    place = place or Surroundings()
    if deployment.requirements is None and options.launch.image is None:
        raise UserError(
            f"{deployment.name} is for this machine's CPU, and {NO_CPU_IMAGE}, and --image NAME names one of your own "
            "for compose and kubernetes"
        )
    server, gateway = _server(deployment, options, more, place), _gateway(more, place)
    return DeploymentDescription(deployment, package, options, more, server, gateway, place.nodes)


def start_deadline_s(deployment: Deployment, options: ServeOptions) -> float:
    """Time to become ready: the one that was asked for, or what the bytes of the weights take."""
    return options.start_deadline_s(deployment)


def _server(
    deployment: Deployment, options: ServeOptions, more: ManifestOptions, place: Surroundings
) -> Container:
    deadline_s = start_deadline_s(deployment, options)
    image = "pipeline-serve" if place.nodes == 1 else "pipeline-group"
    environment = {
        "PIPELINE_START_TIMEOUT_S": f"{deadline_s:.0f}",
        "PIPELINE_STOP_TIMEOUT_S": str(place.server_stop_s - _STOP_MARGIN_S),
    }
    resources = _resources(deployment, options, more, place)
    if place.nodes > 1:
        environment["PIPELINE_GROUP_GPUS"] = str(resources.gpus)
    ports = {"grpc": GRPC, "metrics": METRICS}
    if options.ports.http is not None:
        ports = {"http": HTTP, **ports}
        environment["PIPELINE_HTTP_PORT"] = str(HTTP)
        environment["PIPELINE_ALLOWED_HOSTS"] = ",".join(place.server_names)
    return Container(
        name="triton",
        image=options.launch.image or f"{image}:{__version__}",
        arguments=(),
        environment=environment,
        ports=ports,
        mounts=(
            Mount(CONTAINER_ROOT, "package"),
            Mount("/tmp", "scratch", writable=True),
            # Kernels that are compiled at the start lie below HOME.
            Mount(HOME, "scratch", writable=True, executable=True),
        ),
        ready=Check(command=(PYTHON, "-m", "pipeline.serving.health")),
        alive=Check(command=(PYTHON, "-m", "pipeline.serving.health", "alive")),
        start_s=deadline_s,
        stop_s=place.server_stop_s,
        resources=resources,
    )


def _resources(
    deployment: Deployment, options: ServeOptions, more: ManifestOptions, place: Surroundings
) -> Resources:
    required = deployment.requirements
    if required is None:
        return Resources(memory=more.memory, shm_mib=max(64, deployment.launch.shm_mib))
    gpus, group = required.gpus, None
    if place.nodes > 1:
        gpus = required.gpus // place.nodes
        # Their names are known when they run.
        group = HostGroup(tuple(f"host-{index}" for index in range(place.nodes)), gpus, "hosts", "ssh_config")
    facts = launch_facts(required.tensorrt_llm)
    plan = plan_launch(deployment, CHECKED, GpuPlace(slots=0, group=group))
    limits = (one.partition("=") for one in facts.container_options[1::2])
    return Resources(
        gpus=gpus,
        devices=options.launch.gpus,
        memory=more.memory,
        shm_mib=plan.shm_mib,
        ulimits={name: int(value) for name, _, value in limits},
    )


def _gateway(more: ManifestOptions, place: Surroundings) -> Container:
    recipe = () if more.recipe is None else (RECIPE_FILE,)
    mounts = [Mount(CONTAINER_ROOT, "package"), Mount("/tmp", "scratch", writable=True)]
    if more.recipe is not None:
        mounts += [Mount(RECIPE_FILE, "recipe"), Mount(STORE, "store", writable=True)]
    return Container(
        name="gateway",
        image=more.gateway_image or f"pipeline-gateway:{__version__}",
        arguments=(
            *("gateway", *recipe, "--package", CONTAINER_ROOT),
            *("--endpoint", place.endpoint),
            *("--host", "0.0.0.0", "--port", str(GATEWAY_PORT)),
            *(() if place.gateway_drain_s is None else ("--drain-s", str(place.gateway_drain_s))),
            *place.gateway_arguments,
        ),
        environment={},
        ports={"http": GATEWAY_PORT},
        mounts=tuple(mounts),
        ready=Check(path="/readyz"),
        alive=Check(path="/healthz"),
        start_s=60,
        stop_s=place.gateway_stop_s,
    )


def outer_ports(options: ServeOptions) -> dict[str, int]:
    """Name -> port under which others reach the server's, of those that are open."""
    ports = {"http": options.ports.http, "grpc": options.ports.grpc, "metrics": options.ports.metrics}
    return {name: port for name, port in ports.items() if port is not None}
