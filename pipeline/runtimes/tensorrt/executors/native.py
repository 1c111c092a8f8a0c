"""trtllm-build of this machine, found on PATH: in a container of NVIDIA's, or where TensorRT-LLM is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.executors.base import BuildLog
from pipeline.runtimes.tensorrt.executors.builder import build
from pipeline.runtimes.tensorrt.executors.gpu_check import check_gpus
from pipeline.runtimes.tensorrt.executors.job import PROGRAM, UNBUFFERED, BuildJob
from pipeline.runtimes.tensorrt.executors.process import Launch

_VERSION_DEADLINE_S = 60
_VERSION = "import importlib.metadata; print(importlib.metadata.version('tensorrt_llm'))"


@dataclass(frozen=True, slots=True)
class Native:
    """See `Executor`."""

    deadline_s: float | None = None
    devices: tuple[int, ...] = ()  # GPUs that may be used; empty: those that are visible

    def check(self, version: str) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise UserError(
                f"there is no {PROGRAM} on PATH: install TensorRT-LLM {version}, or build with --executor docker, or "
                "with --executor print on another machine"
            )
        found = installed_version(Path(program))
        if found is not None and found != version:
            raise UserError(
                f"{program} is of TensorRT-LLM {found}, the recipe's runtime.version is {version}: install that, "
                "change the recipe, or build with --executor docker"
            )

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        self.check(job.version)
        gpu = check_gpus(job, self.devices)
        # nvidia-smi counts in the order of the bus, CUDA by itself from the fastest on.
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | dict(os.environ) | UNBUFFERED
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        program, *arguments = job.command(job.checkpoint, job.output)
        program = shutil.which(program) or program

        def launch(folder: Path) -> Launch:
            return Launch((program, *arguments), folder, environment)

        log = build(job, progress, launch, executor="native", deadline_s=self.deadline_s)
        return replace(log, gpu=gpu.name, driver=gpu.driver)


def installed_version(program: Path) -> str | None:
    """Version of the TensorRT-LLM that a console script belongs to; None where the script's Python does not tell.

    The metadata of the distribution is read by that Python; importing TensorRT-LLM itself would take half a minute and
    a GPU.
    """
    python = _interpreter(program)
    if python is None:
        return None
    try:
        done = subprocess.run(
            [*python, "-c", _VERSION],
            capture_output=True,
            text=True,
            timeout=_VERSION_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _interpreter(script: Path) -> list[str] | None:
    """The Python of a script's first line; pip writes `#!/bin/sh` and `exec` where its path is too long for that."""
    with script.open("rb") as file:
        first, second = (file.readline().decode(errors="replace").strip() for _ in range(2))
    if not first.startswith("#!"):
        return None
    words = shlex.split(first[2:])
    if words and Path(words[0]).name == "sh" and second.startswith("'''exec' "):
        words = shlex.split(second.removeprefix("'''exec' "))[:1]
    return words if any("python" in Path(word).name for word in words) else None
