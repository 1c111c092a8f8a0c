"""A server with TensorRT-LLM as processes of this machine: the Triton of the container that this runs in."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.machine.host import mpi_slots
from pipeline.serving.gpu_launch import LaunchPlan, Place, plan_launch
from pipeline.serving.launch import Ports, Start, check_models
from pipeline.serving.mirror import mirror
from pipeline.triton.deployment import CONTAINER_ROOT, REPOSITORY, Deployment


@dataclass(frozen=True, slots=True)
class NativeLauncher:
    """See `pipeline.serving.launch.Launcher`."""

    deployment: Deployment
    package: Path
    devices: tuple[int, ...] = ()  # GPUs it may use; empty: all
    server: str | None = None  # None: where the containers have it

    attempts = 1  # what takes minutes to load is not loaded twice without being asked
    noise = ()

    def check(self) -> None:
        """Raises InvalidInput: its launch section is impossible, or the repository holds other models than it says."""
        check_models(self.package / REPOSITORY, self.deployment.models)
        plan_launch(self.deployment, Place(Ports(8000, 8001, 8002), "check-"))

    def launch(self, start: Start) -> NativeLaunch:
        place = native_place(start, devices=self.devices, server=self.server)
        if self.package.absolute() != Path(CONTAINER_ROOT):
            place = replace(place, repository=str(start.stage / "repository"))
        return NativeLaunch(plan_launch(self.deployment, place), place.repository, self.package, start)


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """See `pipeline.serving.launch.Launch`."""

    plan: LaunchPlan
    repository: str  # as the server sees it
    package: Path
    start: Start

    cleanup = ()

    @property
    def command(self) -> tuple[str, ...]:
        return self.plan.command

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.plan.environment, "PYTHONUNBUFFERED": "1"}

    @property
    def gave_up(self) -> tuple[str, ...]:
        return self.plan.gave_up

    @property
    def synonyms(self) -> dict[str, str]:
        return {self.repository: str(self.package / REPOSITORY)}

    def prepare(self) -> None:
        """Mirror the repository, unless the package lies where its own paths say that it does."""
        if self.package.absolute() != Path(CONTAINER_ROOT):
            source = self.package.absolute() / REPOSITORY
            mirror(source, Path(self.repository), root=(CONTAINER_ROOT, self.package.absolute()))


def native_place(start: Start, *, devices: tuple[int, ...] = (), server: str | None = None) -> Place:
    """This machine, for a package at CONTAINER_ROOT."""
    return Place(
        ports=start.ports,
        shared_memory_prefix=start.shared_memory_prefix,
        address=start.address,
        root=os.geteuid() == 0,
        slots=mpi_slots(),
        devices=devices,
        server=server,
        drain_s=start.drain_s,
        stub_timeout_s=round(start.deadline_s),
    )
