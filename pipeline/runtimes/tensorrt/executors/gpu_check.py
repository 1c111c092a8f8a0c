"""Whether the GPUs of this machine are those that an engine is for: an engine runs only where its like built it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pipeline.errors import UserError
from pipeline.machine.gpus import read_gpus, visible
from pipeline.runtimes.tensorrt.executors.job import BuildJob


@dataclass(frozen=True, slots=True)
class BuildGpu:
    """What built an engine, as the driver names it. None: the driver was not to be asked."""

    name: str | None
    driver: str | None


def check_gpus(job: BuildJob, devices: tuple[int, ...]) -> BuildGpu:
    """Where the driver cannot be asked nothing is said: the builder itself will fail.

    Raises:
        UserError: there are GPUs, but of another kind, or too few.
    """
    all_gpus, problem = read_gpus()
    if problem:
        return BuildGpu(None, None)
    seen = visible(all_gpus, devices, os.environ)
    if len(seen) < job.workers:
        raise UserError(
            f"{job.name}: {job.workers} ranks are built at a time, a GPU each; this machine shows {len(seen)} "
            f"of its {len(all_gpus)} GPUs"
        )
    used = seen[: job.workers]
    for gpu in used:
        if gpu.sm != job.sm:
            raise UserError(
                f"{job.name} is for {job.gpu} (SM {job.sm}), GPU {gpu.index} here is {gpu.name} (SM {gpu.sm}), and an "
                "engine runs only on the kind of GPU that built it: build on the right machine (--executor print makes "
                "a script for it), or change runtime.gpu"
            )
    return BuildGpu(used[0].name, used[0].driver)
