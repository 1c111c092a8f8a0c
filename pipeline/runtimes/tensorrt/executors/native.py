"""trtllm-build of this machine, found on PATH: in a container of NVIDIA's, or where TensorRT-LLM is installed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import UserError
from pipeline.machine.programs import tensorrt_llm_of
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.executors.base import PROGRAM, UNBUFFERED, BuildJob, BuildLog
from pipeline.runtimes.tensorrt.executors.builder import build, check_gpus
from pipeline.runtimes.tensorrt.executors.process import BuilderProcess


@dataclass(frozen=True, slots=True)
class NativeExecutor:
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
        found = tensorrt_llm_of(Path(program))
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

        def launch(folder: Path) -> BuilderProcess:
            return BuilderProcess((program, *arguments), folder, environment)

        log = build(job, progress, launch, executor="native", deadline_s=self.deadline_s)
        return replace(log, gpu=gpu.name, driver=gpu.driver)
