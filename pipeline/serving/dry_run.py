"""What a deployment would run, before it does: the command, its environment, the `docker run` line. For people and
scripts."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.plan.preflight import Finding
from pipeline.serving.docker import DockerLauncher
from pipeline.serving.launch import Ports, Start
from pipeline.serving.server import local_launcher
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

_STAGE = Path("/tmp/pipeline-triton")


@dataclass(frozen=True, slots=True)
class Outline:
    """All that a start is made of."""

    name: str
    package: Path
    command: tuple[
        str, ...
    ]  # of the server; for a GPU as the container runs it, with the package at CONTAINER_ROOT
    environment: dict[str, str]  # besides what is set already
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
        lines += [f"# ready within {self.start_deadline_s:.0f} s, or it is ended"]
        lines += [f"# {found.mark} on this machine: {found} [{found.rule}]" for found in self.findings]
        return "\n".join(lines)


def outline(
    deployment: Deployment,
    package: Path,
    *,
    ports: Ports,
    address: str,
    start_deadline_s: float,
    docker: DockerLauncher | None,
    findings: tuple[Finding, ...] = (),
    built: bool = True,
    note: str = "",
) -> Outline:
    """`docker`: how a container would be started; None for a deployment that needs none.

    Raises:
        UserError: it cannot be started at all, wherever that is.
    """
    start = Start(_STAGE, ports, f"pipeline-{deployment.name}-", address, start_deadline_s)
    if docker is None:
        launch = local_launcher(deployment, package).launch(start)
        command, environment = launch.command, {"PIPELINE_TRITON_GRPC": start.grpc_url}
        line: tuple[str, ...] = ()
        shm_mib = None
    else:
        plan = docker.plan(start)
        command, environment = plan.command, dict(plan.environment)
        line, shm_mib = docker.launch(start, name=f"pipeline-{deployment.name}").command, plan.shm_mib
    return Outline(
        deployment.name, package, command, environment, line, shm_mib, start_deadline_s, findings, built, note
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
