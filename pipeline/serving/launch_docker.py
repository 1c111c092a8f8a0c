"""A container that serves a package, as a `docker run` line.

The command inside is the launch plan of the deployment, so that an image from NVIDIA does as well as one from our
Dockerfile. The package is mounted read-only at the path that its own files name.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.serving.launch import Launch, Start, check_models
from pipeline.serving.launch_gpu import GpuPlace, plan_launch
from pipeline.serving.ports import ANYWHERE, GRPC, METRICS, Listeners, Ports
from pipeline.triton.deployment import CONTAINER_ROOT, REPOSITORY, Deployment

# Addresses inside the container.
_LISTENERS = Listeners.at(Ports(None, GRPC, METRICS), ANYWHERE)
# Between the container's SIGTERM and its SIGKILL, besides the time to drain.
_STOPPING_S = 15


def plan_in_container(
    deployment: Deployment, start: Start, *, slots: int | None = None, traces: str | None = None
) -> Launch:
    """Work out how the server is started inside the container, whoever the image's user is.

    Args:
        slots: Processes that mpirun may start on this host; None for enough.
        traces: URL of an OTLP/HTTP receiver of spans, as the container reaches it; None for no spans.
    """
    # Allowing root harms no other user.
    place = GpuPlace(root=True, slots=slots, traces=traces)
    return plan_launch(deployment, replace(start, listeners=_LISTENERS), place)


def docker_launch(
    deployment: Deployment,
    package: Path,
    image: str,
    start: Start,
    *,
    devices: tuple[int, ...] = (),
    slots: int | None = None,
    traces: str | None = None,
    name: str | None = None,
    docker: str = "docker",
) -> Launch:
    """Make the `docker run` line of a package for a GPU; see `plan_in_container` for `slots` and `traces`.

    Args:
        image: Image, by digest where that is known.
        devices: GPUs of the host; empty for as many as the package needs.
        name: Name of the container; None for a unique name.

    Raises:
        InvalidInput: The deployment's launch section is impossible.
    """
    plan = plan_in_container(deployment, start, slots=slots, traces=traces)
    requirements, ports = deployment.requirements, start.ports
    assert requirements is not None, "the plan was made from them"
    assert ports is not None, "they are published"
    name = name or f"pipeline-{deployment.name}-{secrets.token_hex(4)}"
    published = ((ports.grpc, GRPC), (ports.metrics, METRICS))

    def prepare() -> None:
        check_models(package / REPOSITORY, deployment.models)
        if shutil.which(docker) is None:
            raise UserError(
                f"there is no {docker!r} on PATH: install Docker and the NVIDIA Container Toolkit"
            )

    return Launch(
        command=(
            *(docker, "run", "--rm", "--init", "--name", name),
            *("--gpus", _gpus(devices, requirements.gpus)),
            f"--shm-size={plan.shm_mib}m",
            *launch_facts(requirements.tensorrt_llm).container_options,
            f"--stop-timeout={start.drain_s + _STOPPING_S}",
            *(part for outer, inner in published for part in ("-p", f"{start.address}:{outer}:{inner}")),
            *("--mount", f"type=bind,source={package.absolute()},target={CONTAINER_ROOT},readonly"),
            *(part for key, value in plan.environment.items() for part in ("--env", f"{key}={value}")),
            image,
            *plan.command,
        ),
        prepare=prepare,
        cleanup=(docker, "rm", "--force", name),
        gave_up=plan.gave_up,
        ranks=plan.ranks,
        shm_mib=plan.shm_mib,
    )


def _gpus(devices: tuple[int, ...], count: int) -> str:
    """Docker reads this as a line of CSV: several devices need quotes around them."""
    return '"device=' + ",".join(map(str, devices)) + '"' if devices else str(count)
