"""The Docker of this machine: whether its daemon answers, whether containers can be given GPUs, and its images.

An image is there or not, by the digest that its registry gave it; `pull_image` gets it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ServerError
from pipeline.machine.probe import run_command
from pipeline.plan.machine_facts import DockerFacts
from pipeline.progress import Progress

_DEADLINE_S = 30.0
_HOOK = "nvidia-container-runtime-hook"  # `--gpus` needs no more than this beside a local daemon
_CDI = ("etc/cdi", "var/run/cdi")  # specifications of devices


def read_docker(
    deadline_s: float = _DEADLINE_S, docker: str = "docker", root: Path = Path("/")
) -> DockerFacts:
    """Read the Docker of this machine; `root` holds etc/ and var/."""
    if shutil.which(docker) is None:
        problem, fix = f"there is no {docker} on PATH", "install Docker and the NVIDIA Container Toolkit"
        return DockerFacts(None, problem=problem, fix=fix)
    output = run_command([docker, "info", "--format", "{{json .}}"], deadline_s)
    if output.problem:
        return DockerFacts(None, problem=output.problem, fix=_advice(output.problem))
    return _parse(json.loads(output.text), root)


def _parse(info: dict[str, Any], root: Path) -> DockerFacts:
    """Parse `docker info` (Docker 20.10 to 29), which an older client prints even though no daemon answers."""
    if "host" in info and "ServerVersion" not in info:
        problem = "docker is Podman here, whose containers are given GPUs in another way"
        return DockerFacts(None, problem=problem, fix="install Docker")
    errors = info.get("ServerErrors") or []
    if errors or not info.get("ServerVersion"):
        problem = f"docker failed: {' '.join(errors) or 'no daemon answers'}"
        return DockerFacts(None, problem=problem, fix=_advice(problem))
    how = _gpu_way(info, root)
    return DockerFacts(
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


_INSPECT_DEADLINE_S = 60
_LAYER = re.compile(r"[0-9a-f]{12}: ")
_DONE = (": Pull complete", ": Already exists")


@dataclass(frozen=True, slots=True)
class Image:
    """Image as Docker describes it."""

    name: str  # as it was asked for
    digest: str | None  # "nvcr.io/nvidia/tritonserver@sha256:…"; None for one that came from no registry

    @property
    def reference(self) -> str:
        """Name by digest where that is known, so that the image that was inspected is the one that runs."""
        return self.digest or self.name


def find_image(name: str, docker: str = "docker") -> Image | None:
    """Return the image if this machine has it.

    Raises:
        ServerError: Docker does not answer.
    """
    try:
        done = subprocess.run(
            [docker, "image", "inspect", name],
            capture_output=True,
            text=True,
            timeout=_INSPECT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"docker does not answer: {error}") from None
    if done.returncode:
        if "No such image" in done.stderr or "no such image" in done.stderr:
            return None
        raise ServerError(f"docker does not answer: {done.stderr.strip()}")
    facts = json.loads(done.stdout)[0]
    repository = name.partition("@")[0]
    tag = repository.rpartition("/")[2].partition(":")[2]
    repository = repository.removesuffix(f":{tag}") if tag else repository
    digests = [digest for digest in facts.get("RepoDigests") or [] if digest.startswith(f"{repository}@")]
    return Image(name, digests[0] if digests else None)


def pull_image(name: str, progress: Progress, *, deadline_s: float, docker: str = "docker") -> Image:
    """Pull an image from its registry.

    Raises:
        ServerError: It cannot be pulled within the time; the text has Docker's message.
    """
    progress.say(f"pulling {name} (10 to 20 GB), for at most {deadline_s / 60:.0f} minutes")
    try:
        pull = subprocess.Popen(
            [docker, "pull", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ServerError(f"docker does not answer: {error}") from None
    late = threading.Event()
    timer = threading.Timer(deadline_s, lambda: _end(pull, late))
    timer.start()
    try:
        with pull:
            messages = _follow(pull, name, progress)
    except BaseException:
        pull.kill()
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise ServerError(f"{name} could not be pulled within {deadline_s:g} s")
    if pull.returncode:
        raise ServerError(f"{name} cannot be pulled: {' '.join(messages[-3:])}")
    image = find_image(name, docker)
    if image is None:
        raise ServerError(f"{name} was pulled, but Docker does not have it")
    return image


def _follow(pull: subprocess.Popen[str], name: str, progress: Progress) -> list[str]:
    """Count the layers as they come, and return all other lines."""
    assert pull.stdout is not None, "it was started with a pipe"
    messages = []
    with progress.task(f"pull {name}", unit="layers") as task:
        for line in map(str.strip, pull.stdout):
            if _LAYER.match(line) is None:
                messages.append(line)
            elif line.endswith(_DONE):
                task.advance()
    return messages


def _end(pull: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    pull.kill()
