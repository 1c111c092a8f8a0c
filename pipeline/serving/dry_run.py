"""What `serve` would run, for people and scripts: the command, its environment, the `docker run` line."""

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
from pipeline.serving.launch_docker import DockerLauncher
from pipeline.serving.ports import Listeners
from pipeline.serving.preflight import check_container, check_local
from pipeline.serving.server import local_launcher
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

_STAGE = Path("/tmp/pipeline-triton")


@dataclass(frozen=True, slots=True)
class DryRun:
    """All that a start is made of; `str` gives it as lines for a shell."""

    name: str
    package: Path
    # Of the server; for a GPU as the container runs it, with the package at CONTAINER_ROOT.
    command: tuple[str, ...]
    environment: dict[str, str]  # besides what is set already
    ports: dict[str, int]  # at which others reach it, by protocol
    docker: tuple[str, ...]  # empty where no container is meant to serve
    shm_mib: int | None
    start_deadline_s: float
    findings: tuple[Finding, ...]  # what this machine lacks
    built: bool = True  # False: the package is not there yet, and sizes of weights are estimates
    note: str = ""  # what a reader must know besides

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        return {
            "name": self.name,
            "package": str(self.package),
            "built": self.built,
            "note": self.note,
            "command": list(self.command),
            "environment": self.environment,
            "ports": self.ports,
            "docker": list(self.docker),
            "shm_mib": self.shm_mib,
            "start_deadline_s": self.start_deadline_s,
            "findings": [asdict(found) for found in self.findings],
        }

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
        lines += [f"# {found.mark} on this machine: {found} [{found.rule}]" for found in self.findings]
        return "\n".join(lines)


def dry_run(
    package: Path, options: ServeOptions, foreseen: Deployment | None = None, note: str = ""
) -> DryRun:
    """Work out what `serve` would run, and what this machine lacks for it; nothing is started or pulled.

    Args:
        package: Folder of the package.
        options: How to serve it.
        foreseen: The deployment of a package that is not built yet; then nothing of the package is read.
        note: What a reader must know besides.

    Raises:
        UserError: It cannot be started at all, wherever that is.
    """
    deployment = foreseen or Deployment.load(package)
    deadline_s = options.start_deadline_s or deployment.start_deadline_s
    start = Start(
        _STAGE, Listeners.within(_STAGE, options.ports, options.address), f"pipeline-{deployment.name}-",
        options.ports, options.address, deadline_s,
    )  # fmt: skip
    in_container = options.target_of(deployment) == "docker"
    docker: tuple[str, ...] = ()
    shm_mib = None
    if deployment.runtime == "cpu":
        command = local_launcher(deployment, package, options.traces).launch(start).command
        environment = {"PIPELINE_TRITON_GRPC": start.listeners.grpc_url}
    else:
        name = options.image_of(deployment)
        with suppress(ServerError):  # without Docker the name will do
            if (image := find_image(name)) is not None:
                name = image.reference
        launcher = DockerLauncher(
            deployment, package, name, options.devices, mpi_slots(), traces=options.traces
        )
        plan = launcher.plan(start)
        command, environment, shm_mib = plan.command, dict(plan.environment), plan.shm_mib
        docker = launcher.launch(start, name=f"pipeline-{deployment.name}").command
    if in_container:
        found = check_container(deployment, package, options, None)  # to ask the image, it would have to run
    else:
        found = check_local(deployment, package, options)
    return DryRun(
        name=deployment.name,
        package=package,
        command=command,
        environment=environment,
        ports=options.ports.open,
        docker=docker,
        shm_mib=shm_mib,
        start_deadline_s=deadline_s,
        findings=found,
        built=foreseen is None,
        note=note,
    )


def shell_lines(command: tuple[str, ...]) -> str:
    """A command for a shell, one option a line; the blocks of mpirun begin at the margin.

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
