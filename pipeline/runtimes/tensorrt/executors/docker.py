"""trtllm-build in a container: the very image that will serve the engine, so that nothing can disagree.

The image is resolved to its digest before, and that digest is what runs and what the manifest records. The container
sees the checkpoint read-only, the output, and the folder with the timing cache; its files are ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.contracts.launching import launch_facts
from pipeline.errors import UserError
from pipeline.machine.docker import find_image, pull_image
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.executors.base import UNBUFFERED, BuildJob, BuildLog
from pipeline.runtimes.tensorrt.executors.builder import build, check_gpus
from pipeline.runtimes.tensorrt.executors.process import BuilderProcess

CHECKPOINT, ENGINE, WORK = "/build/checkpoint", "/build/engine", "/build/work"  # as the container sees them
PULL_DEADLINE_S = 3600.0
_INFO_DEADLINE_S = 30
_ROOTLESS, _SELINUX = "name=rootless", "name=selinux"


@dataclass(frozen=True, slots=True)
class DockerExecutor:
    """See `Executor`."""

    deadline_s: float | None = None
    devices: tuple[int, ...] = ()  # GPUs of this machine; empty: as many as workers
    docker: str = "docker"

    def check(self, version: str) -> None:  # noqa: ARG002 - the image has the version
        self._security_options()

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        security = ",".join(self._security_options())
        gpu = check_gpus(job, self.devices)
        image = find_image(job.image, self.docker) or pull_image(
            job.image, progress, deadline_s=PULL_DEADLINE_S, docker=self.docker
        )
        progress.say(f"    image: {image.reference}")
        name = container_name(job)

        def launch(folder: Path) -> BuilderProcess:
            remove = (self.docker, "rm", "--force", name)
            subprocess.run(
                remove, capture_output=True, check=False
            )  # of a builder whose guard was killed, too
            command = self.command(job, folder, name=name, image=image.reference, security=security)
            return BuilderProcess(command, folder, os.environ, cleanup=remove)

        log = build(job, progress, launch, executor="docker", deadline_s=self.deadline_s)
        return replace(log, image=job.image, image_digest=image.digest, gpu=gpu.name, driver=gpu.driver)

    def command(
        self, job: BuildJob, folder: Path, *, name: str, image: str, security: str
    ) -> tuple[str, ...]:
        """`docker run`; `security`: what the daemon says of its options."""
        facts = launch_facts(job.version)
        # A rootless Docker gives files to the user who calls by itself.
        user = () if _ROOTLESS in security else ("--user", f"{os.getuid()}:{os.getgid()}")
        # The store's files keep their labels.
        labels = ("--security-opt", "label=disable") if _SELINUX in security else ()
        # A user whom the image does not know has no home, and torch asks for a name.
        environment = {"HOME": WORK, "USER": "builder", "LOGNAME": "builder", **UNBUFFERED}
        return (
            *(self.docker, "run", "--rm", "--init", "--name", name),
            *("--gpus", _gpus(self.devices, job.workers)),
            f"--shm-size={facts.shm_mib(job.workers)}m",
            *facts.container_options,
            *user,
            *labels,
            *("--mount", _mount(job.checkpoint, CHECKPOINT, "readonly")),
            *("--mount", _mount(job.output, ENGINE)),
            *("--mount", _mount(folder, WORK)),
            *("--workdir", WORK),
            *(part for key, value in environment.items() for part in ("--env", f"{key}={value}")),
            image,
            *job.command(CHECKPOINT, ENGINE),
        )

    def _security_options(self) -> list[str]:
        """Raises UserError: DockerExecutor does not work here."""
        advice = "build with --executor native in a container of NVIDIA's, or with --executor print on another machine"
        if shutil.which(self.docker) is None:
            raise UserError(f"there is no {self.docker!r} on PATH; {advice}")
        try:
            done = subprocess.run(
                [self.docker, "info", "--format", "{{json .SecurityOptions}}"],
                capture_output=True,
                text=True,
                timeout=_INFO_DEADLINE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"docker does not answer ({error}); {advice}") from None
        if done.returncode:
            raise UserError(f"docker does not answer ({(done.stderr or done.stdout).strip()}); {advice}")
        options: list[str] = json.loads(done.stdout) or []
        return options


def container_name(job: BuildJob) -> str:
    """One for each output: two stores may build the same recipe at once."""
    place = hashlib.sha256(str(job.output.absolute()).encode()).hexdigest()[:8]
    return f"pipeline-build-{job.name}-{place}"


def _gpus(devices: tuple[int, ...], count: int) -> str:
    """Docker reads this as a line of CSV: several devices need quotes around them."""
    return '"device=' + ",".join(map(str, devices)) + '"' if devices else str(count)


def _mount(source: Path, target: str, *more: str) -> str:
    """Docker reads this as a line of CSV, too."""
    fields = ["type=bind", f"source={source.absolute()}", f"target={target}", *more]
    return ",".join(
        '"' + field.replace('"', '""') + '"' if "," in field or '"' in field else field for field in fields
    )
