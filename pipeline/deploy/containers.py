"""The package that files are written for, and what its two containers have in common in Compose and Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from pipeline import __version__
from pipeline.contracts.images import ServingImage, named_image
from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.plan.artifact_sizes import ArtifactSizes
from pipeline.recipe import Recipe, TritonSection
from pipeline.serving.launch import HostGroup, ServeOptions
from pipeline.serving.launch_gpu import CHECKED, GpuPlace, plan_launch
from pipeline.serving.ports import GRPC, HTTP, METRICS
from pipeline.settings import Settings
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment


class ScalingPolicy(Settings):
    """When servers are added and taken away."""

    requests: float = Field(
        default=0.7,
        description="Target of running and waiting requests, as a share of those that a server answers at once.",
    )
    spare: int = Field(default=1, description="Servers on top of those that the requests ask for.")
    queue_time: float = Field(
        default=0.5,
        description="Wait for a slot (p95), as a share of the target of the time to first token (p95).",
    )
    kv_cache: float = Field(default=0.8, description="Share of the KV cache in use.")
    interval_s: int = Field(default=15, description="Time from one look to the next.")
    up_window_s: int = Field(
        default=0, description="Time for which the least demand counts before servers are added."
    )
    up_percent: int = Field(
        default=100,
        description="Most servers added in a minute, in percent of those there are; or `up_pods`, if more.",
    )
    up_pods: int = Field(default=4, description="See `up_percent`.")
    down_window_s: int = Field(
        default=600, description="Time for which the greatest demand counts before servers are taken away."
    )
    down_percent: int = Field(
        default=10, description="Most servers taken away in a minute, in percent; or `down_pods`, if more."
    )
    down_pods: int = Field(default=1, description="See `down_percent`.")
    max_waiting: float = Field(
        default=0.25,
        description="Requests that may wait in all gateways, as a share of those that the least number of servers "
        "answers at once; more get 429.",
    )
    lost_node_s: int = Field(
        default=30,
        description="Time after which pods of a node that does not answer are made anew elsewhere.",
    )
    gateway_cpu: int = Field(
        default=70,
        description="Mean use of the processors that gateways request, in percent, above which some are added.",
    )


@dataclass(frozen=True, slots=True)
class DeployedPackage:
    """The package that is deployed.

    Attributes:
        deployment: Its deployment.json, also where it is not built yet.
        folder: Its folder on this machine; the name is that of the artifact.
        recipe: Recipe that it is served with; its sections say how it is deployed.
        recipe_text: Text of what gateways and builds need of the recipe, as YAML; None where only the package is known.
        questions: Text of the recipe's golden questions, for a build in the cluster; None for none.
        sizes: Bytes of the recipe's artifacts; None where only the weights of the package are known.
        content: SHA-256 (hex) of the package's manifest, which has those of all its files; None while it is not built.
        verify_key: Public key that signatures of packages are held against, as PEM; None takes unsigned packages.
    """

    deployment: Deployment
    folder: Path
    recipe: Recipe
    recipe_text: str | None = None
    questions: str | None = None
    sizes: ArtifactSizes | None = None
    content: str | None = None
    verify_key: str | None = None

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.deployment.name


RECIPE_FILE = "/etc/pipeline/recipe.yaml"
NO_CPU_IMAGE = "no image carries that runtime: pipeline serve runs it, --target systemd makes it a service"
# For the supervisor, after the server has ended; a container that is not done then is killed.
STOP_MARGIN_S = 15
_GATEWAY_PORT = 8080
_STOP_S = 60
# Fields of the section `triton` that the entrypoint of the container takes.
_SUPERVISION = ("health_interval_s", "hang_timeout_s", "max_restarts", "restart_window_s")


@dataclass(frozen=True, slots=True)
class ServerContainer:
    """Triton, below the supervisor that starts it again.

    Attributes:
        image: With its tag, or its digest where that was given.
        environment: Variables besides those of the image.
        ports: Name -> port that it listens on.
        start_s: Time to become ready.
        stop_s: Time from the request to stop until it is killed.
        gpus: GPUs of its machine.
        shm_mib: Size of /dev/shm.
        ulimits: Name -> soft and hard limit; -1 is none.
        build: Lines of the command that builds the image; empty for one of the recipe's.
    """

    image: str
    environment: Mapping[str, str]
    ports: Mapping[str, int]
    start_s: float
    stop_s: int
    gpus: int
    shm_mib: int
    ulimits: Mapping[str, int] = field(default_factory=dict)
    build: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayContainer:
    """OpenAI's API in front of Triton.

    Attributes:
        image: With its tag, or its digest where that was given.
        arguments: Arguments of the image's own entrypoint.
        stop_s: Time from the request to stop until it is killed.
        start_s: Time to become ready.
        port: Port that it listens on.
    """

    image: str
    arguments: tuple[str, ...]
    stop_s: int
    start_s: int = 60
    port: int = _GATEWAY_PORT


def server_container(
    deployment: Deployment,
    options: ServeOptions,
    *,
    stop_s: int = _STOP_S,
    nodes: int = 1,
    names: Sequence[str] = ("triton",),
) -> ServerContainer:
    """Decide what the container of Triton has.

    Args:
        stop_s: Time from the request to stop until it is killed.
        nodes: Machines that share the ranks of one server.
        names: Names by which clients call it over HTTP.

    Raises:
        UserError: No image carries its runtime.
        InvalidInput: It cannot be started like that; all reasons.
    """
    required, base = deployment.requirements, base_image(deployment)
    if required is None and options.triton.image is None:
        raise UserError(
            f"{deployment.name} is for this machine's CPU, and {NO_CPU_IMAGE}, and --set triton.image=NAME names one "
            "of your own for compose and kubernetes"
        )
    start_s = options.start_deadline_s(deployment)
    environment = {
        "PIPELINE_START_TIMEOUT_S": f"{start_s:.0f}",
        "PIPELINE_STOP_TIMEOUT_S": str(stop_s - STOP_MARGIN_S),
    }
    for name in _SUPERVISION:
        value = getattr(options.triton, name)
        if value != TritonSection.model_fields[name].default:
            environment[f"PIPELINE_{name.upper()}"] = f"{value:g}"
    gpus, shm_mib, ulimits = 0, max(64, deployment.launch.shm_mib), dict[str, int]()
    if required is not None:
        gpus, group = required.gpus // nodes, None
        if nodes > 1:
            environment["PIPELINE_GROUP_GPUS"] = str(gpus)
            # Their names are known when they run.
            hosts = tuple(f"host-{index}" for index in range(nodes))
            group = HostGroup(hosts, gpus, "hosts", "ssh_config")
        shm_mib = plan_launch(deployment, CHECKED, GpuPlace(slots=0, group=group)).shm_mib
        limits = launch_facts(required.tensorrt_llm).container_options[1::2]
        ulimits = {name: int(value) for name, _, value in (limit.partition("=") for limit in limits)}
    ports = {"grpc": GRPC, "metrics": METRICS}
    if options.ports.http is not None:
        ports = {"http": HTTP, **ports}
        environment["PIPELINE_HTTP_PORT"] = str(HTTP)
        environment["PIPELINE_ALLOWED_HOSTS"] = ",".join(names)
    stage = "serve" if nodes == 1 else "group"
    image = options.triton.image or f"pipeline-{stage}:{__version__}"
    # The recipe's own image is somebody else's to build.
    base = None if options.triton.image is not None else base
    build = () if base is None else base.build_command(stage, image)
    return ServerContainer(image, environment, ports, start_s, stop_s, gpus, shm_mib, ulimits, build)


def base_image(deployment: Deployment) -> ServingImage | None:
    """The image that a package was made for; None for one for a CPU."""
    required, runtime = deployment.requirements, deployment.runtime
    if required is None or runtime == "cpu":
        return None
    return named_image(required.image, required.tensorrt_llm, runtime)


def gateway_container(
    package: DeployedPackage,
    endpoint: str,
    *,
    drain_s: int | None = None,
    arguments: Sequence[str] = (),
) -> GatewayContainer:
    """Decide what the container of the gateway has.

    Args:
        package: The package that it serves.
        endpoint: Triton's gRPC, as the gateway names it.
        drain_s: Time that it leaves to requests under way when it is to end; None for that of the recipe.
        arguments: Further arguments.
    """
    leaves_s = package.recipe.gateway.drain_s if drain_s is None else drain_s
    recipe = () if package.recipe_text is None else (RECIPE_FILE,)
    return GatewayContainer(
        image=package.recipe.deploy.gateway_image or f"pipeline-gateway:{__version__}",
        arguments=(
            *("gateway", *recipe, "--package", CONTAINER_ROOT, "--endpoint", endpoint),
            *("--host", "0.0.0.0", "--port", str(_GATEWAY_PORT)),
            *(() if drain_s is None else ("--set", f"gateway.drain_s={drain_s}")),
            *arguments,
        ),
        stop_s=max(_STOP_S if drain_s is None else 0, leaves_s + STOP_MARGIN_S),
    )
