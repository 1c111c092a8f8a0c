"""A container that serves a package: the `docker run` line as a value, and the launcher that runs it.

The command inside is the very launch plan of the deployment, so that an image from NVIDIA does as well as one from our
Dockerfile. The package is mounted read-only where its own paths say that it lies.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.serving.launch import Start, check_models
from pipeline.serving.launch_gpu import LaunchContext, LaunchPlan, plan_launch
from pipeline.serving.ports import ANYWHERE, GRPC, METRICS, Listeners, Ports
from pipeline.triton.deployment import CONTAINER_ROOT, REPOSITORY, Deployment

_LISTENERS = Listeners.at(Ports(None, GRPC, METRICS), ANYWHERE)  # in the container
_STOPPING_S = 15  # between the container's SIGTERM and its SIGKILL, besides the time to drain


@dataclass(frozen=True, slots=True)
class DockerLauncher:
    """See `pipeline.serving.launch.Launcher`."""

    deployment: Deployment
    package: Path
    image: str  # by digest where that is known
    devices: tuple[int, ...] = ()  # GPUs of the host; empty: as many as it needs
    slots: int | None = None  # of mpirun on this host; None: enough
    docker: str = "docker"
    traces: str | None = None  # where an OTLP/HTTP receiver takes spans, as the container reaches it

    local = False
    attempts = 1
    noise = ()

    def check(self) -> None:
        """Raises UserError: there is no docker, or the package cannot be served by a container."""
        check_models(self.package / REPOSITORY, self.deployment.models)
        self.plan(Start(Path(), _LISTENERS, "check-"))
        if shutil.which(self.docker) is None:
            raise UserError(
                f"there is no {self.docker!r} on PATH: install Docker and the NVIDIA Container Toolkit"
            )

    def launch(self, start: Start, *, name: str | None = None) -> DockerLaunch:
        unique = f"pipeline-{self.deployment.name}-{secrets.token_hex(4)}"
        return DockerLaunch(self, self.plan(start), start, name or unique)

    def plan(self, start: Start) -> LaunchPlan:
        """How the server is started inside the container, whoever the image's user is."""
        place = LaunchContext(
            listeners=_LISTENERS,
            shared_memory_prefix=start.shared_memory_prefix,
            root=True,  # allowing it harms no other user
            slots=self.slots,
            drain_s=start.drain_s,
            stub_timeout_s=round(start.deadline_s),
            traces=self.traces,
        )
        return plan_launch(self.deployment, place)


@dataclass(frozen=True, slots=True)
class DockerLaunch:
    """See `pipeline.serving.launch.Launch`."""

    launcher: DockerLauncher
    plan: LaunchPlan
    start: Start
    name: str  # of the container

    @property
    def command(self) -> tuple[str, ...]:
        launcher, start, ports = self.launcher, self.start, self.start.ports
        requirements = launcher.deployment.requirements
        assert requirements is not None, "the plan was made from them"
        assert ports is not None, "they are published"
        published = ((ports.grpc, GRPC), (ports.metrics, METRICS))
        return (
            *(launcher.docker, "run", "--rm", "--init", "--name", self.name),
            *("--gpus", _gpus(launcher.devices, requirements.gpus)),
            f"--shm-size={self.plan.shm_mib}m",
            *launch_facts(requirements.tensorrt_llm).container_options,
            f"--stop-timeout={start.drain_s + _STOPPING_S}",
            *(part for outer, inner in published for part in ("-p", f"{start.address}:{outer}:{inner}")),
            "--mount",
            f"type=bind,source={launcher.package.absolute()},target={CONTAINER_ROOT},readonly",
            *(part for name, value in self.plan.environment.items() for part in ("--env", f"{name}={value}")),
            launcher.image,
            *self.plan.command,
        )

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def cleanup(self) -> tuple[str, ...]:
        return (self.launcher.docker, "rm", "--force", self.name)

    @property
    def gave_up(self) -> tuple[str, ...]:
        return self.plan.gave_up

    @property
    def synonyms(self) -> dict[str, str]:
        return {}

    def prepare(self) -> None:
        """Nothing: the container finds all in place."""


def _gpus(devices: tuple[int, ...], count: int) -> str:
    """Docker reads this as a line of CSV: several devices need quotes around them."""
    return '"device=' + ",".join(map(str, devices)) + '"' if devices else str(count)
