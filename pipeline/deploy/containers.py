"""The two containers of a deployment, Triton and the gateway, as far as Compose and Kubernetes have them in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline import __version__
from pipeline.contracts.images import ServingImage, named_image
from pipeline.contracts.launching import launch_facts
from pipeline.deploy.package import DeployedPackage
from pipeline.errors import UserError
from pipeline.recipe import TritonSection
from pipeline.serving.launch import HostGroup, ServeOptions
from pipeline.serving.launch_gpu import CHECKED, GpuPlace, plan_launch
from pipeline.serving.ports import GRPC, HTTP, METRICS
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

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
