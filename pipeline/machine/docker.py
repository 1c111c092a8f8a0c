"""The Docker of this machine: whether its daemon answers, and whether containers can be given GPUs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.machine.probe import ask

_DEADLINE_S = 30.0
_HOOK = "nvidia-container-runtime-hook"  # `--gpus` needs no more than this beside a local daemon
_CDI = ("etc/cdi", "var/run/cdi")  # specifications of devices


@dataclass(frozen=True, slots=True)
class Docker:
    """What was found."""

    version: str | None  # of the daemon; None: it does not answer
    problem: str = ""  # why not
    fix: str = ""
    gpu_runtime: bool | None = None  # containers may be given GPUs; None: nobody could tell
    gpu_how: str = ""  # "nvidia runtime" | "CDI" | "nvidia hook"
    rootless: bool = False
    folder: str | None = None  # where the daemon keeps images


def read_docker(deadline_s: float = _DEADLINE_S, docker: str = "docker", root: Path = Path("/")) -> Docker:
    """That of this machine. `root`: where etc/ and var/ lie."""
    if shutil.which(docker) is None:
        return Docker(
            None, f"there is no {docker} on PATH", "install Docker and the NVIDIA Container Toolkit"
        )
    said = ask([docker, "info", "--format", "{{json .}}"], deadline_s)
    if said.problem:
        return Docker(None, said.problem, _advice(said.problem))
    return _told(json.loads(said.text), root)


def _told(info: dict[str, Any], root: Path) -> Docker:
    """What `docker info` (Docker 20.10 to 29) says; an older client prints this though no daemon answers."""
    if "host" in info and "ServerVersion" not in info:
        return Docker(
            None, "docker is Podman here, whose containers are given GPUs in another way", "install Docker"
        )
    errors = info.get("ServerErrors") or []
    if errors or not info.get("ServerVersion"):
        problem = f"docker failed: {' '.join(errors) or 'no daemon answers'}"
        return Docker(None, problem, _advice(problem))
    how = _gpu_way(info, root)
    return Docker(
        version=info["ServerVersion"],
        gpu_runtime=bool(how),
        gpu_how=how,
        rootless=any("rootless" in option for option in info.get("SecurityOptions") or ()),
        folder=info.get("DockerRootDir") or None,
    )


def _gpu_way(info: dict[str, Any], root: Path) -> str:
    if any("nvidia" in name for name in info.get("Runtimes") or ()):
        return "nvidia runtime"
    discovered = [str(device) for device in info.get("DiscoveredDevices") or ()]
    folders = [root / folder for folder in _CDI]
    listed = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    if any("nvidia.com/gpu" in name for name in discovered) or any("nvidia" in file.name for file in listed):
        return "CDI"
    return "nvidia hook" if shutil.which(_HOOK) else ""


def _advice(problem: str) -> str:
    lowered = problem.lower()
    if "permission denied" in lowered:
        return "sudo usermod -aG docker $USER, and log in again"
    if "does not answer within" in lowered:
        return "systemctl restart docker"
    if os.environ.get("DOCKER_HOST"):
        return "see where DOCKER_HOST points"
    return "systemctl start docker" if "cannot connect" in lowered or "no daemon" in lowered else ""
