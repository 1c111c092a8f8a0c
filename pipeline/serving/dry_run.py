"""The commands that `serve` would run, for people and scripts."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ServerError
from pipeline.machine.docker import find_image
from pipeline.machine.host import mpi_slots
from pipeline.plan.preflight import Finding
from pipeline.serving.launch import ServeOptions, Start
from pipeline.serving.launch_docker import docker_launch, plan_in_container
from pipeline.serving.ports import Listeners
from pipeline.serving.preflight import check_container, check_local
from pipeline.serving.server import local_launcher
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

_STAGE = Path("/tmp/pipeline-triton")


@dataclass(frozen=True, slots=True)
class DryRun:
    """All that a start is made of; `str` gives it as lines for a shell.

    Attributes:
        built: Whether the package is there; if not, sizes of weights are estimates.
        note: Remark for a reader.
        command: Command of the server; for a GPU as the container runs it, with the package at CONTAINER_ROOT.
        environment: Variables besides those that are set already.
        ports: Protocol -> port at which others reach it.
        docker: `docker run` line; empty where no container is meant to serve.
        findings: Faults of this machine.
    """

    name: str
    package: Path
    built: bool
    note: str
    command: tuple[str, ...]
    environment: dict[str, str]
    ports: dict[str, int]
    docker: tuple[str, ...]
    shm_mib: int | None
    start_deadline_s: float
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        return {**asdict(self), "package": str(self.package)}

    def __str__(self) -> str:
        lines = [f"# {self.name}, from {self.package}"]
        if not self.built:
            lines += [
                "# This package is not built yet; its size, and so the time to load it, is an estimate."
            ]
        lines += [f"# {line}" for line in self.note.splitlines()]
        if self.docker:
            lines += ["# in a container:", shell_lines(self.docker), ""]
            lines += [f"# without docker, inside the image, with the package at {CONTAINER_ROOT}:"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [shell_lines(self.command), ""]
        lines += ["# reached at " + ", ".join(f"{kind} {port}" for kind, port in self.ports.items())]
        lines += [f"# ready within {self.start_deadline_s:.0f} s, or it is ended"]
        lines += [
            f"# {finding.mark} on this machine: {finding} [{finding.rule}]" for finding in self.findings
        ]
        return "\n".join(lines)


def dry_run(
    package: Path, options: ServeOptions, foreseen: Deployment | None = None, note: str = ""
) -> DryRun:
    """Work out what `serve` would run, and what this machine lacks for it; nothing is started or pulled.

    Nothing is read of a package that is not built yet, but `foreseen`.

    Raises:
        UserError: It cannot be started at all, wherever that is.
    """
    deployment = foreseen or Deployment.load(package)
    deadline_s, address = options.start_deadline_s(deployment), options.triton.address
    start = Start(
        _STAGE, Listeners.within(_STAGE, options.ports, address), f"pipeline-{deployment.name}-",
        options.ports, address, deadline_s,
    )  # fmt: skip
    in_container = options.target_of(deployment) == "docker"
    docker: tuple[str, ...] = ()
    shm_mib = None
    if deployment.runtime == "cpu":
        command = local_launcher(deployment, package, options.traces)(start).command
        environment = {"PIPELINE_TRITON_GRPC": start.listeners.grpc_url}
    else:
        name = options.image_of(deployment)
        # Without Docker the name will do.
        with suppress(ServerError):
            if (image := find_image(name)) is not None:
                name = image.reference
        plan = plan_in_container(deployment, start, slots=mpi_slots(), traces=options.traces)
        command, environment, shm_mib = plan.command, dict(plan.environment), plan.shm_mib
        docker = docker_launch(
            deployment, package, name, start, devices=options.gpus, slots=mpi_slots(),
            traces=options.traces, name=f"pipeline-{deployment.name}",
        ).command  # fmt: skip
    if in_container:
        # To ask the image, it would have to run.
        findings = check_container(deployment, package, options, None)
    else:
        findings = check_local(deployment, package, options)
    return DryRun(
        name=deployment.name,
        package=package,
        built=foreseen is None,
        note=note,
        command=command,
        environment=environment,
        ports=options.ports.open,
        docker=docker,
        shm_mib=shm_mib,
        start_deadline_s=deadline_s,
        findings=findings,
    )


def shell_lines(command: tuple[str, ...]) -> str:
    """Write a command for a shell, one option a line; the blocks of mpirun begin at the margin.

    >>> print(shell_lines(("a", "-n", "1", "--b=c d")))
    a \\
      -n 1 \\
      '--b=c d'
    """
    lines: list[list[str]] = []
    for index, part in enumerate(command):
        begins = part.startswith("-") or part == ":" or (lines and lines[-1][0] == ":")
        if index == 0 or begins or (lines and _complete(lines[-1])):
            lines.append([part])
        else:
            lines[-1].append(part)
    return " \\\n  ".join(" ".join(map(shlex.quote, line)) for line in lines)


def _complete(line: list[str]) -> bool:
    """Whether an option has its value: --name=value has it in itself, -x value is two."""
    return len(line) > 1 or "=" in line[0] or not line[0].startswith("-")
